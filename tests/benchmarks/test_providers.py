"""Which peers are here, what they are chosen by, and what they do not offer."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

import normforge
from benchmarks.cells import Cell, Norm, QuantisedCell, Task
from benchmarks.providers import every_provider, find_providers
from benchmarks.suites.batch_invariant import GROUPS, PROVIDER

from .small import holds_to_the_oracle


def test_peers_are_found_by_import_and_named_when_absent() -> None:
    present, absent = find_providers([])
    assert {"eager", "copy", "normforge"} <= present.keys()
    assert list(present)[-2:] == ["normforge", "copy"]
    assert present.keys().isdisjoint(absent)
    assert present.keys() | absent.keys() == every_provider().keys()
    assert all(absent.values())


def test_providers_are_chosen_by_pattern() -> None:
    assert list(find_providers(["c*y", "eager"])[0]) == ["eager", "copy"]
    with pytest.raises(ValueError, match=r"--providers nobody names no provider; there are .*eager"):
        find_providers(["nobody"])


def test_batch_invariant_calls_are_invariant_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = Mock(wraps=normforge.batch_invariant)
    monkeypatch.setattr(normforge, "batch_invariant", entered)
    holds_to_the_oracle(PROVIDER, Cell(Task.ADD_QUANT, Norm.LAYER, 2, 96, out_dtype="fp8", group=GROUPS[0]))
    entered.assert_called()


COLUMN: dict[str, Any] = {"columns": 128, "column_major": True}


def _plain(task: Task, norm: Norm, dtype: str = "bf16", **options: Any) -> Cell:
    return Cell(task, norm, 8, 256, dtype, **options)


def _quantised(task: Task, norm: Norm, **options: Any) -> Cell:
    return QuantisedCell(task, norm, 8, 256, **options)


# By peers, what none of them computes.
OTHERS = {
    ("cudnn",): [_plain(Task.FORWARD, Norm.LAYER, heads=(4, 6))],
    ("tutorial05",): [_plain(Task.FORWARD, Norm.RMS), _plain(Task.ADD, Norm.LAYER)],
    ("flashinfer", "flashinfer-both"): [
        _plain(Task.FORWARD, Norm.LAYER, "fp16"),
        _plain(Task.FORWARD, Norm.LAYER, heads=(4, 6)),
        _plain(Task.FORWARD, Norm.RMS, "fp32"),
        _plain(Task.BACKWARD, Norm.RMS),
        _quantised(Task.ADD_QUANTISED, Norm.LAYER, static=True),
        _quantised(Task.QUANTISED, Norm.RMS),
        _quantised(Task.ADD_QUANTISED, Norm.RMS, columns=128),
        _quantised(Task.ADD_QUANTISED, Norm.RMS, packed=True, **COLUMN),
        _quantised(Task.ADD_QUANTISED, Norm.RMS, **COLUMN | {"columns": 64}),
    ],
    ("helion",): [
        _plain(Task.FORWARD, Norm.LAYER, heads=(4, 6)),
        _plain(Task.QUANT, Norm.RMS, out_dtype="int8", smooth=True),
        _plain(Task.BACKWARD, Norm.RMS),
        _quantised(Task.QUANTISED, Norm.LAYER),
        _quantised(Task.QUANTISED, Norm.RMS, static=True),
        _quantised(Task.QUANTISED, Norm.RMS, unquantised=True),
        _quantised(Task.QUANTISED, Norm.RMS, packed=True, **COLUMN),
        _quantised(Task.QUANTISED, Norm.RMS, columns=32),
    ],
}


@pytest.mark.parametrize("peers", OTHERS, ids="-".join)
def test_what_a_peer_does_not_compute_is_not_offered(peers: tuple[str, ...]) -> None:
    known = every_provider()
    assert [(peer, cell.id) for peer in peers for cell in OTHERS[peers] if known[peer].builder(cell)] == []

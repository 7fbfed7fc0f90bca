"""Which peers are here, and what they are chosen by."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

import normforge
from benchmarks.cells import Cell, Norm, Task
from benchmarks.inputs import make_inputs
from benchmarks.oracle import expect
from benchmarks.providers import every_provider, find_providers
from benchmarks.runner import prepare
from benchmarks.suites.batch_invariant import GROUPS, PROVIDER


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
    inputs = make_inputs(Cell(Task.ADD_QUANT, Norm.LAYER, 2, 96, out_dtype="fp8", group=GROUPS[0]), torch.device("cpu"))
    prepare(every_provider()[PROVIDER], [inputs], expect(inputs))
    entered.assert_called()

"""Calls timed on the host: how figures come about, and the command from end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli, parts
from benchmarks.parts import BESIDE, NOTHING, WHOLE, Part, measure, nothing, summarised

from ..thorough import THOROUGH
from .small import records

M, N = 2, 64


@THOROUGH
def test_another_revision_is_timed_beside_this_one(tmp_path: Path) -> None:
    tree = Path(__file__).resolve().parents[2]
    given = ["--seconds", "0", "--beside", str(tree), "--beside-revision", "another", "--out", str(tmp_path)]
    assert cli.main(["parts", *given]) == 0
    header, rows = records(tmp_path, "parts")
    assert header[0] == "# device: Triton's CPU interpreter"
    assert {"# beside: another", f"# shape: {M}×{N}"} <= set(header)
    assert {record["passes"] for record in rows} == {"2"}
    ours, theirs = (
        {record["part"] for record in rows if record["group"] == group and not record["part"].startswith("F.")}
        for group in (WHOLE, BESIDE)
    )
    assert theirs == ours
    families = {"layer_norm", "add_layer_norm, dropout", "modulated_layer_norm", "gated_rms_norm", "group_norm"}
    assert theirs >= {"layernorm2d_fwd", "quantised_rms_norm", *(f"{name}, backward alone" for name in families)}


def test_every_part_has_its_round_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def one_round(call: Callable[[], Any], calls: int) -> float:
        assert calls == 50
        order.append("nothing" if call is nothing else call())
        return float(len(order))

    monkeypatch.setattr(parts, "_round", one_round)
    a, b = Part(WHOLE, "a", lambda: "a"), Part(WHOLE, "b", lambda: "b")
    times = measure((a, b), 50, 0.0, 2)
    assert order == ["a", "b", "nothing"] * 4
    # Two passes count for nothing.
    assert times == {a: [7, 10], b: [8, 11], NOTHING: [9, 12]}


def test_a_call_of_nothing_is_taken_off_each() -> None:
    times = {Part(WHOLE, "one", nothing): [20.0, 30.0, 41.0], NOTHING: [0.5, 8.0, 0.5]}
    (row,) = summarised(times)
    # Of the median and the least by themselves, not of what lies between them in one pass.
    assert (row.group, row.part, row.us, row.us_min, row.passes) == (WHOLE, "one", 29.5, 19.5, 3)

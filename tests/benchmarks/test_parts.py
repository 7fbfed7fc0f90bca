"""Calls timed on the host: how figures come about, and the command from end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import parts
from benchmarks.parts import NOTHING, WHOLE, Part, measure, nothing, summarised


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

"""The unit, the rule and the report, of made-up errors."""

from __future__ import annotations

from dataclasses import replace

import torch

from proving.accuracy.measure import Cell
from proving.accuracy.report import Outcome, summary, table, text
from proving.accuracy.rows import KINDS
from proving.accuracy.units import Error, Exact, error, floor_of, median, ratio, rounded, ulp

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def test_a_unit_is_the_distance_to_the_next_number() -> None:
    for dtype in FLOATS:
        values = torch.tensor([1.0, 1.5, 0.1, 777.0, 3e-5, 6e-8], dtype=torch.float64).to(dtype)
        above = torch.nextafter(values, torch.tensor(float("inf"), dtype=dtype)) if dtype is torch.float32 else None
        # The bits of a positive number, counted one up, are the next one's.
        bits = values.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
        following = (bits + 1).view(dtype)
        assert above is None or torch.equal(above, following)
        assert torch.equal(ulp(values.double(), dtype), following.double() - values.double())


def test_correct_rounding_is_within_half_a_unit() -> None:
    exact = torch.randn(4, 1000, dtype=torch.float64)
    for dtype in FLOATS:
        found = error(exact.to(dtype), exact, torch.zeros(4, 1))
        assert 0.45 < found.largest <= 0.5
        assert 0.2 < found.rms < 0.35


def test_values_that_cancel_are_counted_in_the_unit_of_a_typical_one() -> None:
    exact = torch.tensor([[1.0, -1.5, 1e-12]], dtype=torch.float64)
    actual = exact.float()
    actual[0, 2] += 2.0**-24
    assert abs(error(actual, exact, median(exact)).largest - 0.5) < 1e-6
    assert error(actual, exact, torch.zeros(1, 1)).largest > 1e3


def test_no_right_digit_and_no_number_count_alike() -> None:
    exact = torch.tensor([1.0, 1e300], dtype=torch.float64)
    for wrong in (float("nan"), float("inf"), 1e30):
        actual = torch.tensor([wrong, float("inf")])
        assert error(actual, exact, torch.zeros(2)).largest == 2**23


def test_errors_below_the_floor_are_equal_and_above_it_compared() -> None:
    for dtype in FLOATS:
        floor = floor_of(dtype)
        assert ratio(Error(0.5 + floor, 0.3), Error(0.0, 0.0), dtype) == 1
        assert ratio(Error(0.5 + 5 * floor, 0.3), Error(0.2, 0.3), dtype) > 4
        assert ratio(Error(0.5 + 9 * floor, 0.3), Error(0.5 + 3 * floor, 0.3), dtype) < 4
        assert ratio(Error(0.5, 4 * (0.3 + floor) + 0.1), Error(0.5, 0.2), dtype) > 2.5


def test_what_is_rounded_on_the_way_may_go_either_way_at_a_tie_and_nowhere_else() -> None:
    tie = 1 + 2.0**-8  # of bf16, whose neighbours of 1 are 2**-7 apart
    rows = torch.tensor([[tie, tie + 15 * 2.0**-23, tie + 17 * 2.0**-23, 1.0]], dtype=torch.float64)
    nearest, either = rounded(rows, torch.bfloat16)
    assert nearest.tolist() == [[1.0, 1 + 2.0**-7, 1 + 2.0**-7, 1.0]]
    assert either.tolist() == [[2.0**-7, 2.0**-7, 0.0, 0.0]]
    exact = Exact(nearest, median(nearest), either)
    assert exact.error_of(torch.tensor([[1 + 2.0**-7, 1.0, 1 + 2.0**-7, 1.0]])).largest == 0
    assert exact.error_of(torch.tensor([[1.0, 1.0, 1.0, 1.0]])).largest == 2.0**-7 / 2.0**-23
    assert exact.error_of(torch.tensor([[1.0, 1.0, float("nan"), 1.0]])).largest == 2.0**23


def test_little_is_open() -> None:
    rows = torch.randn(8, 4096, dtype=torch.float64)
    for dtype, share in ((torch.float16, 0.02), (torch.bfloat16, 0.003)):
        assert 0 < (rounded(rows, dtype)[1] > 0).double().mean() < share


def cell(ours: float, theirs: float) -> Cell:
    found = Error(ours, 0.3), Error(theirs, 0.3)
    times = ratio(*found, torch.float32)
    return Cell("one_pass", "fwd", "ln_fwd_fp32_mv", "fp32", 4096, "one_pass 1 1024 4", "random", "y", *found, times)


def test_the_rule_holds_in_every_cell_and_in_most() -> None:
    good, middling, bad = cell(1.0, 1.0), cell(7.0, 3.0), cell(20.0, 1.0)
    assert Outcome([good, good, middling], []).ok
    assert not Outcome([good, middling], []).ok
    assert not Outcome([good, good, good, bad], []).ok
    assert not Outcome([good, good], ["a case: it did not compile"]).ok
    assert not Outcome([], []).ok


def test_what_fails_is_printed_and_is_in_the_table_and_its_summary() -> None:
    good, bad = cell(1.0, 1.0), replace(cell(20.0, 1.0), kind="outlier")
    outcome = Outcome([good, bad], ["a case: OutOfResources"])
    found = table(outcome, {"device": "a card", "seed": "0"})
    for report in (text(outcome), summary(found)):
        assert "1 of 2 cells are within 4 times torch's error" in report
        assert "a case: OutOfResources" in report
        assert "20.0" in report
    assert "does not hold in 1 cells of Forward one_pass LayerNorm fp32 y: 20.0 units, torch 1.0." in summary(found)
    assert "device a card, seed 0" in summary(found)
    (row,) = found.rows
    assert (row["cells"], row["beyond"], row["no worse"], row["worst rows"]) == ("2", "1", "1", "outlier")
    assert (row["random"], row["outlier"], row["outlier torch"]) == ("1.0", "20.0", "1.0")
    assert set(KINDS) < set(found.columns)

"""The table of cases: whole on a GPU, a line of the report at a time, and a slice in the interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest
import torch

from proving.conformance.case import Case
from proving.conformance.run import run_group
from proving.conformance.suites import SUITES, cases
from proving.conformance.table import interpreted
from proving.evidence import grouped

from ..thorough import first_of_each

SEED = 0


LINES = grouped(cases(), lambda case: "-".join((case.suite, *case.mode)).replace(" ", ""))


@pytest.mark.gpu
@pytest.mark.parametrize("line", LINES)
def test_on_a_gpu(line: str) -> None:
    outcomes = run_group(LINES[line], torch.device("cuda"), SEED)
    assert [str(outcome) for _, outcome in outcomes if not outcome.ok] == []


def kind_of(case: Case) -> Hashable:
    """A mode, whatever its weight's type, row length and suite; beside a norm, what there is, whatever types are."""
    if case.is_beside:
        return (case.family, case.norm, case.gate_first, case.channels_last) if case.n < 1000 else None
    return case.mode, bool(case.arriving)


ONE_A_MODE = first_of_each(interpreted(), kind_of, lambda case: case.id)


@pytest.mark.parametrize("case", ONE_A_MODE)
def test_in_the_interpreter(case: Case) -> None:
    for _, outcome in run_group((case,), torch.device("cpu"), SEED):
        assert outcome.ok, str(outcome)


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.id for case in cases()}) == len(cases())
    assert len({case.id for case in interpreted()}) == len(interpreted())


def test_the_interpreters_slice_has_every_suite_mode_and_dtype() -> None:
    assert {case.suite for case in interpreted()} == set(SUITES)
    for facets in (
        {(case.suite, case.mode) for case in cases()} - {(case.suite, case.mode) for case in interpreted()},
        {(case.x, case.y, case.weight) for case in cases()} - {(case.x, case.y, case.weight) for case in interpreted()},
        {case.inputs for case in cases()} - {case.inputs for case in interpreted()},
    ):
        assert facets == set()


def test_the_table_has_every_combination_of_the_suites_lists() -> None:
    """The lists' lengths as their suites state them, multiplied; edges and our own cases come on top."""
    norms, floats = 2, 3
    least = {
        "ck_tile": 26 * 5 * 2 * 3 * 2 * norms + norms,
        "vllm": (3 * 6 * 2 * 2 * floats + 19 * 2 * 2 * 2) * norms,
        # M × N × dtypes, with and without a bias for LayerNorm, each forward and backward.
        "quack": 4 * 13 * floats * (2 + 1) * 2 + 2 * 16,
        "flash_attention": 5 * 5 * 3 * norms,
        "liger": 8 * floats * norms,
        "flashinfer": 4 * 8 * 2 * 3 * 2 + 4 * 4,
        "triton": 1,
        "normforge": 700,
    }
    counts = Counter(case.suite for case in cases())
    assert set(counts) == set(least)
    assert [suite for suite, count in least.items() if counts[suite] < count] == []

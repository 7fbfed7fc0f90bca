"""Every instance of the loaded table, at awkward shapes, against the fp64 oracle."""

from __future__ import annotations

import pytest

import normforge
from normforge.codegen.model import DType, Mode, legal_modes
from normforge.table import Entry

from .gradients import GradientProblem
from .problems import Problem, mixed_dtypes

MODES = {mode.name: mode for mode in legal_modes()}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# A bucket without a cap is tried at a prime that is no multiple of anything.
LONG_PRIME = 40009


def problems(entry: Entry) -> list[Problem]:
    """Both edges of the bucket and an odd length between; one row, several, and rows with a stride of their own."""
    mode: Mode = MODES[entry.mode]
    first, last = entry.first, entry.last or LONG_PRIME
    middle = (first + last) // 2 | 1
    several = (entry.rows + 1,)
    return [
        Problem(mode, (1, first), dtypes=mixed_dtypes(mode, 0), absent=frozenset({"bias"})),
        Problem(mode, (*several, last), dtypes=mixed_dtypes(mode, 1)),
        Problem(mode, (3, middle), row_stride=middle + 7, dtypes=mixed_dtypes(mode, 2), absent=frozenset({"weight"})),
    ]


def gradient_problems(entry: Entry) -> list[GradientProblem]:
    """The same lengths; more tiles of rows than there are programs in the interpreter, and a row alone."""
    mode: Mode = MODES[entry.mode]
    first, last = entry.first, entry.last or LONG_PRIME
    middle = (first + last) // 2 | 1
    several = (2 if entry.pipeline == "two_pass" else 4) * entry.rows + 1
    return [
        GradientProblem(mode, (1, first), dtypes=mixed_dtypes(mode, 0), has_weight=False),
        GradientProblem(mode, (several, last), dtypes=mixed_dtypes(mode, 1) | {"dy": DType.BF16}),
        GradientProblem(mode, (5, middle), row_stride=middle + 7, dtypes=mixed_dtypes(mode, 2) | {"dy": DType.FP32}),
    ]


FORWARD = [entry for entry in normforge.instances() if not MODES[entry.mode].is_backward]
BACKWARD = [entry for entry in normforge.instances() if MODES[entry.mode].is_backward]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", FORWARD, ids=lambda entry: entry.name)
def test_instance(entry: Entry, device: str) -> None:
    for problem in problems(entry):
        assert normforge.which(**problem.arguments(device), norm=problem.mode.norm) == entry.name
        problem.check(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entry", BACKWARD, ids=lambda entry: entry.name)
def test_gradient_instance(entry: Entry, device: str) -> None:
    for problem in gradient_problems(entry):
        problem.check(device)

"""The backward lists of other suites (conformance.py), and what only a card shows: determinism, Triton's tutorial."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.backward import layernorm2d_bwd, rmsnorm2d_bwd

from .conformance import TUTORIAL_SHAPE, gradient_cases
from .gradients import GradientProblem

INTERPRETED_ROWS = 2
INTERPRETED_LENGTH = 5000


def _id(case: tuple[str, GradientProblem]) -> str:
    suite, problem = case
    details = [suite, problem.mode.name, "x".join(map(str, problem.shape))]
    details += [f"{name}_{dtype.value}" for name, dtype in sorted(problem.dtypes.items())]
    details += [f"offset_{problem.weight_offset:g}"] if problem.weight_offset else []
    return "-".join(details)


CASES = {_id(case): case for case in gradient_cases()}


def _interpreted() -> dict[str, tuple[str, GradientProblem]]:
    few = {}
    for suite, problem in CASES.values():
        if problem.shape[-1] <= INTERPRETED_LENGTH:
            rows = min(INTERPRETED_ROWS, problem.shape[0])
            smaller = replace(problem, shape=(rows, problem.shape[-1]))
            few[_id((suite, smaller))] = (suite, smaller)
    return few


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_gpu(case: tuple[str, GradientProblem]) -> None:
    case[1].check("cuda")


@pytest.mark.parametrize("case", _interpreted().values(), ids=_interpreted())
def test_in_the_interpreter(case: tuple[str, GradientProblem]) -> None:
    case[1].check("cpu")


@pytest.mark.gpu
def test_triton_tutorial() -> None:
    """Its inputs, its comparison with torch and its tolerance."""
    x = -2.3 + 0.5 * torch.randn(TUTORIAL_SHAPE, dtype=torch.float16, device="cuda")
    dy = 0.1 * torch.randn_like(x)
    weight, bias = (torch.rand(TUTORIAL_SHAPE[1:], dtype=torch.float16, device="cuda") for _ in range(2))
    results = []
    for layer_norm in (normforge.layer_norm, functional.layer_norm):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = layer_norm(leaves[0], TUTORIAL_SHAPE[1:], leaves[1], leaves[2], 1e-5)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5000, 100), (4096, 1024), (4096, 5120), (999, 8192), (500, 40000)])
def test_two_runs_give_the_same_bits(shape: tuple[int, int]) -> None:
    x, dy = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = torch.randn(shape[1], device="cuda")
    output = normforge.layernorm2d_fwd(x, weight, save_mv=True)
    assert output.mean is not None
    assert output.rstd is not None
    for _ in range(3):
        layer = [
            layernorm2d_bwd(dy, x, weight, mean=output.mean, rstd=output.rstd, wants=("dx", "dweight", "dbias"))
            for _ in range(2)
        ]
        rms = [rmsnorm2d_bwd(dy, x, weight, rstd=output.rstd, wants=("dx", "dweight")) for _ in range(2)]
        for first, second in (layer, rms):
            for a, b in zip(first, second, strict=True):
                assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))

"""The 2d functions of modulated and gated norms: hard rows, outputs of the caller, compiled calls and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge import LayerNormOutput
from normforge.codegen.model import Mode
from proving.cases import Case, Tensors, cases, operands

from ..calling import each_device, same_bits, there
from ..kernels.problems import Problem
from ..thorough import THOROUGH

BOTH = ("modulated", "gated")
N = 48
# Each row lies within a longer one; groups are those of gated norms.
USUAL: dict[str, Any] = {"dtype": torch.bfloat16, "layout": "gapped", "shape": (5, 3, N)}
each_family = pytest.mark.parametrize("case", cases(*BOTH, vary=(), norm="rms", group_size=16, **USUAL), ids=str)


def of_one_case(family: str, **at: Any) -> Case:
    (case,) = cases(family, vary=(), **{**USUAL, "norm": "rms", **at})
    return case


def given_to(case: Case, device: str = "cpu") -> Tensors:
    return {name: tensor.detach() for name, tensor in operands(case, device).items()}


def run(case: Case, given: Tensors, **options: Any) -> LayerNormOutput:
    function: Callable[..., LayerNormOutput] = getattr(normforge, f"{case.family}_{case['norm']}norm2d_fwd")
    return function(**given, **case.arguments, **options)


@each_device
def test_an_offset_of_the_weight(device: str) -> None:
    case = of_one_case("modulated")
    given = given_to(case, device)
    wanted = run(case, given | {"weight": given["weight"] + 1.0}, fquant="dynamic")
    assert all(map(same_bits, run(case, given, fquant="dynamic", weight_offset=1.0), wanted))


@each_device
@pytest.mark.parametrize(
    ("mode", "n"),
    [
        *(("ln_fwd_bf16_int8_ga_dq", 700), ("rms_fwd_bf16_int8_gb_dq", 700)),
        *(("ln_fwd_bf16_int8_xg_addst_mod_dq", n) for n in (N, 700, 33000)),
    ],
)
def test_rows_are_quantised(mode: str, n: int, device: str) -> None:
    """In each pipeline, and a row a program, as pairs of axes need not have them."""
    # Of short rows a program takes several where they are many.
    Problem(Mode.from_name(mode), 300 if n == N else 4, n).check(device)


@each_device
@each_family
def test_hard_rows_are_quantised(case: Case, device: str) -> None:
    """A closed gate or a scale of -1 leaves zeros, whose y_scale is 1, and a NaN spoils its row or group alone."""
    given = given_to(case, device)
    name, factor = ("gate", -300.0) if case.family == "gated" else ("scale", -1.0)
    given[name][0], given["x"][1, 1, 2] = factor, torch.nan
    if "shift" in given:
        given["shift"].zero_()
    found: Any = run(case, given, fquant="dynamic")
    assert torch.equal(found.y_scale[0], torch.ones_like(found.y_scale[0]))
    assert not found.y[0].any()
    assert (~found.y_scale.isfinite()).nonzero().tolist() == [[1, 1, 0] if case["group_size"] else [1, 1]]


@each_device
@pytest.mark.parametrize("n", [N, pytest.param(33001, marks=THOROUGH)])
def test_outputs_are_written_where_the_caller_says(n: int, device: str) -> None:
    for case in cases("modulated", vary=("norm",), dtype=torch.bfloat16, shape=(2, 3, n)):
        given = given_to(case, device)
        wanted = run(case, given, fquant="dynamic")
        out, before = torch.empty(2, 3, n, dtype=torch.int8, device=device), given["residual"].clone()
        # In place of the residual, and beside it.
        for total in (given["residual"], torch.empty_like(before)):
            given["residual"].copy_(before)
            version = total._version
            found = run(case, given, fquant="dynamic", out=out, residual_out=total)
            assert found.y is out
            assert found.residual_out is total
            assert total._version > version
            assert same_bits(out, wanted.y)
            assert same_bits(total, wanted.residual_out)


@each_family
def test_no_rows(case: Case) -> None:
    found = run(case, given_to(case.but(shape=(0, 3, N))), fquant="dynamic")
    assert (found.y.shape, there(found.y_scale).shape) == ((0, 3, N), (0, 3, 3) if case["group_size"] else (0, 3))

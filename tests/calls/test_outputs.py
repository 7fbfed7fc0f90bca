"""Where outputs go: the caller's own tensors, over an input where that is allowed, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..calling import FLOATS, QUANTISED, check, each_norm, each_pipeline, quantising, same_bits

M = 3
POISON = 0x5A


def sum_of(n: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of a call that adds and stores."""
    return {"x": torch.randn(M, n).to(dtype), "residual": torch.randn(M, n).to(dtype), "fadd": "pre_add_store"}


@each_pipeline
@each_norm
def test_given_tensors_are_written_and_returned(norm: str, n: int) -> None:
    out, residual_out = torch.full((M, n), 7.0), torch.full((M, n), 8.0)
    actual = check(norm, **sum_of(n), out=out, residual_out=residual_out)
    assert actual.y is out
    assert actual.residual_out is residual_out


REPLACED = {
    "out is x": {"out": "x"},
    "out is residual": {"out": "residual"},
    "residual_out is residual": {"residual_out": "residual"},
    "residual_out is x": {"residual_out": "x"},
    "both, straight": {"out": "x", "residual_out": "residual"},
    "both, crossed": {"out": "residual", "residual_out": "x"},
}


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "quantised"])
@pytest.mark.parametrize("replaced", REPLACED.values(), ids=REPLACED)
@each_pipeline
@each_norm
def test_outputs_over_inputs(norm: str, n: int, replaced: dict[str, str], quantised: bool) -> None:
    if quantised and "out" in replaced:
        # A quantised y fits over neither input.
        replaced = {name: given for name, given in replaced.items() if name != "out"}
    arguments = sum_of(n, torch.float16) | ({"fquant": "dynamic"} if quantised else {})
    before = {name: arguments[name].clone() for name in ("x", "residual")}
    outputs = {name: arguments[given] for name, given in replaced.items()}
    actual = check(norm, **arguments, **outputs)
    for name, tensor in outputs.items():
        assert (actual.y if name == "out" else actual.residual_out) is tensor
    for name in set(before) - set(replaced.values()):
        assert same_bits(arguments[name], before[name]), name


def poisoned(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A wider and taller tensor full of one byte, and the (M, n) view in the midst of it."""
    around = torch.full((M + 2, (n + 10) * dtype.itemsize), POISON, dtype=torch.uint8).view(dtype)
    return around, around[1:-1, 3 : 3 + n]


def assert_poisoned_around(around: torch.Tensor, n: int) -> None:
    """Fail if any byte outside the view was written."""
    size = around.dtype.itemsize
    left = around.view(torch.uint8).clone()
    left[1:-1, 3 * size : (3 + n) * size] = POISON
    assert bool((left == POISON).all())


@pytest.mark.parametrize("dtype", FLOATS + QUANTISED, ids=str)
@each_pipeline
@each_norm
def test_nothing_is_written_around_the_rows(norm: str, n: int, dtype: torch.dtype) -> None:
    around, out = poisoned(n, dtype)
    wider, residual_out = poisoned(n, torch.bfloat16)
    arguments = sum_of(n) | quantising(dtype)
    arguments["residual"] = arguments["residual"].bfloat16()
    check(norm, **arguments, out=out, residual_out=residual_out)
    assert_poisoned_around(around, n)
    assert_poisoned_around(wider, n)

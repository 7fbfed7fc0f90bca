"""A residual that is added behind a norm, and a second norm of the sum; proving/cases.py has the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge import LayerNormOutput, errors
from normforge.codegen.values import Norm
from normforge.reference.renormed import FORWARD as ORACLE

from ..calling import LENGTHS, agree, each_device, each_norm, same_bits

FORWARD: dict[str, Any] = {norm: getattr(normforge, f"renormed_{norm}norm2d_fwd") for norm in ("layer", "rms")}


# More than `SMALL_M` of short rows, which programs then take several of.
each_shape = pytest.mark.parametrize("shape", [(300 if n == LENGTHS["rows"] else 5, n) for n in LENGTHS.values()])


def drawn(shape: tuple[int, int], device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def operands_of(norm: str, shape: tuple[int, int], device: str = "cpu", **dtypes: torch.dtype) -> dict[str, Any]:
    """Operands of every kind, rows of x with gaps; LayerNorm's have biases too."""
    m, n = shape
    vectors = ("weight", "next_weight", *(("bias", "next_bias") if norm == "layer" else ()))
    return {
        "x": drawn((m, 2 * n), device, dtypes.get("x", torch.bfloat16))[:, :n],
        "residual": drawn(shape, device, dtypes.get("residual", torch.bfloat16)),
        **{name: drawn((1, n), device, torch.float32)[0] for name in vectors},
    }


def check(norm: str, operands: dict[str, Any], **options: Any) -> LayerNormOutput:
    """Run a call twice, known and not, and hold every output against the oracle."""
    for _ in range(2):
        output: LayerNormOutput = FORWARD[norm](**operands, **options)
        agree(output, ORACLE[Norm(norm)](**operands, **options, stored=output.residual_out))
    return output


@each_device
@each_shape
@each_norm
def test_outputs(norm: str, shape: tuple[int, int], device: str) -> None:
    output: Any = check(norm, operands_of(norm, shape, device, residual=torch.float32), save_mv=True)
    assert (output.y.dtype, output.residual_out.dtype) == (torch.bfloat16, torch.float32)
    assert output.rstd.shape == (shape[0], 2)
    check(norm, operands_of(norm, shape, device), cast="before_weight", out_dtype=torch.float32)
    operands = operands_of(norm, shape, device, x=torch.float32, residual=torch.float16)
    check(norm, {name: operands[name] for name in ("x", "residual")}, eps=0.1, save_mv=True)


@each_device
@each_shape
def test_rows_far_from_zero_and_ragged_ones_keep_their_precision(shape: tuple[int, int], device: str) -> None:
    """Of x, and of the sum: a mean of thousands of times the spread; columns beyond the row count for nothing."""
    m, n = shape
    x = 1e4 + 1e-2 * drawn((m, n - 3), device, torch.float32)
    check("layer", {"x": x, "residual": 30 + drawn((m, n - 3), device, torch.float32)}, save_mv=True)


@each_device
@each_shape
@each_norm
@pytest.mark.parametrize("over", ["x", "residual"])
def test_in_place(over: str, norm: str, shape: tuple[int, int], device: str) -> None:
    operands = {"x": drawn(shape, device), "residual": drawn(shape, device)}
    wanted = FORWARD[norm](**operands)
    other = {"x": "residual", "residual": "x"}[over]
    output = FORWARD[norm](**operands, residual_out=operands[over], out=operands[other])
    assert output.residual_out is operands[over]
    assert output.y is operands[other]
    assert same_bits(output.residual_out, wanted.residual_out)
    assert same_bits(output.y, wanted.y)


@pytest.mark.parametrize("m", [0, 1, 3, 4])
@each_norm
def test_statistics_of_any_number_of_rows(norm: str, m: int) -> None:
    check(norm, operands_of(norm, (m, 64)), save_mv=True)
    operands = {name: each.requires_grad_() for name, each in operands_of(norm, (m, 64)).items()}
    y, total = getattr(normforge, f"{norm}_norm_add")(**operands)
    torch.autograd.backward((y, total), (torch.ones_like(y), torch.ones_like(total)))
    assert all(operand.grad is not None for operand in operands.values())


@each_norm
def test_autocast_leaves_the_dtype_of_the_residual(norm: str) -> None:
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 64)
    function = getattr(normforge, f"{norm}_norm_add")
    with torch.autocast("cpu", torch.bfloat16):
        y = function(x, residual)
    assert same_bits(y, function(x, residual))
    assert y.dtype is torch.float32


def test_refusals() -> None:
    x = torch.randn(5, 64)
    with pytest.raises(errors.ConflictError, match="x_bias is not added where a second norm follows"):
        normforge.rms_norm_add(x, x, x_bias=x[0], next_norm=True)
    with pytest.raises(errors.ConflictError, match="next_norm"):
        normforge.rms_norm_add(x, x, next_norm="yes")  # type: ignore[call-overload]

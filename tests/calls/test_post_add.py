"""A residual added behind the norm, `fadd="post_add"`, in the 2d functions; proving/cases.py has the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.errors import ConflictError, IllegalCombinationError

from ..calling import FORWARD, LENGTHS, check, each_device, each_norm, same_bits

ADDED: dict[str, Any] = {"fadd": "post_add"}

# More than `SMALL_M` of short rows, which programs then take several of.
each_shape = pytest.mark.parametrize("shape", [(300 if n == LENGTHS["rows"] else 5, n) for n in LENGTHS.values()])


def drawn(shape: tuple[int, int], device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


@each_device
@each_shape
@each_norm
def test_outputs(norm: str, shape: tuple[int, int], device: str) -> None:
    """By the oracle: of rows with gaps, an x_bias, a cast, and an fp8 x; y has the dtype of the residual."""
    m, n = shape
    x, residual = drawn((m, 2 * n), device)[:, :n], drawn(shape, device, torch.float32)
    weight, x_bias = drawn(shape, device)[0], drawn(shape, device, torch.float16)[0]
    output = check(norm, x, weight, residual=residual, x_bias=x_bias, save_mv=True, **ADDED)
    assert (output.y.dtype, output.residual_out) == (torch.float32, None)
    check(norm, x, weight, residual=residual.bfloat16(), cast="before_weight", **ADDED)
    scale = torch.full((1,), 0.5, device=device)
    check(norm, x.to(torch.float8_e4m3fn), weight, residual=residual, x_scale=scale, out_dtype=torch.float16, **ADDED)


@each_device
@each_shape
@each_norm
@pytest.mark.parametrize("over", ["x", "residual"])
def test_in_place(over: str, norm: str, shape: tuple[int, int], device: str) -> None:
    """Also of rows whose first values are far from the mean, which LayerNorm may compute twice."""
    operands = {"x": drawn(shape, device), "residual": drawn(shape, device)}
    operands["x"][:, :16] += 1000.0
    wanted = FORWARD[norm](**operands, **ADDED).y
    output = FORWARD[norm](**operands, **ADDED, out=operands[over])
    assert output.y is operands[over]
    assert same_bits(output.y, wanted)


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"fquant": "dynamic"}, IllegalCombinationError),
        ({"dropout_p": 0.5, "dropout_rng": (1, 2)}, IllegalCombinationError),
        ({"residual": None}, ConflictError),
        ({"residual_out": torch.zeros(5, 64)}, ConflictError),
    ],
    ids=("fquant", "dropout_p", "residual", "residual_out"),
)
def test_refusals(others: dict[str, Any], error: type[Exception]) -> None:
    x = torch.randn(5, 64)
    with pytest.raises(error, match="post_add"):
        normforge.layernorm2d_fwd(x, **{"residual": x.clone(), **ADDED, **others})


@each_norm
def test_autocast_leaves_the_dtype_of_the_residual(norm: str) -> None:
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 64)
    function = getattr(normforge, f"{norm}_norm_add")
    with torch.autocast("cpu", torch.bfloat16):
        y = function(x, residual)
    assert same_bits(y, function(x, residual))
    assert y.dtype is torch.float32

"""Element types: every operand may have one of its own, and weight and bias may be absent, without a new instance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge

from ..calling import FLOATS, FORWARD, check, each_float, each_norm, each_pipeline
from .shared import there

M = 3
OPERANDS = ("weight", "bias", "residual", "x_bias", "smooth_scale")


def operand(name: str, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """The keywords that bring one operand into a call, in a dtype."""
    tensor = torch.randn((M, n) if name == "residual" else (n,)).to(dtype)
    mode = {"residual": {"fadd": "pre_add_store"}, "smooth_scale": {"fquant": "smooth_dynamic"}}
    return {name: tensor, **mode.get(name, {})}


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPERANDS)
@each_float
def test_operand_dtypes(name: str, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    n = 130
    x = torch.randn(M, n).to(x_dtype)
    norms = ("layer",) if name == "bias" else ("layer", "rms")
    for norm in norms:
        keywords = operand(name, n, dtype)
        actual = check(norm, x, **keywords)
        assert actual.residual_out is None or actual.residual_out.dtype == dtype
        # Which types the operands have is no axis: one instance serves them all.
        same = keywords | {name: keywords[name].to(x_dtype)}
        assert normforge.which(x, **keywords, norm=norm) == normforge.which(x, **same, norm=norm)


@each_pipeline
def test_every_operand_in_another_dtype(n: int) -> None:
    keywords: dict[str, Any] = {}
    for index, name in enumerate(OPERANDS):
        keywords |= operand(name, n, FLOATS[index % 3])
    check("layer", torch.randn(M, n).bfloat16(), **keywords, out_dtype=torch.float8_e4m3fn, save_mv=True)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@each_norm
def test_outputs_are_rounded_once(norm: str, dtype: torch.dtype) -> None:
    """To nearest even, from the fp32 values that a call with an output in fp32 returns."""
    x, residual = torch.randn(M, 700), torch.randn(M, 700).to(dtype)
    assert torch.equal(FORWARD[norm](x, out_dtype=dtype).y, FORWARD[norm](x).y.to(dtype))
    stored = FORWARD[norm](x, residual=residual, fadd="pre_add_store").residual_out
    assert torch.equal(there(stored), (x + residual).to(dtype))


@each_pipeline
def test_x_bias_is_added_to_every_row_and_to_the_stored_sum(n: int) -> None:
    x, x_bias, residual = torch.randn(M, n), torch.randn(n), torch.randn(M, n)
    actual = check("rms", x, x_bias=x_bias, residual=residual, fadd="pre_add_store")
    torch.testing.assert_close(there(actual.residual_out), x + x_bias + residual, rtol=0, atol=1e-6)

"""Rows that are rounded before the weight: the functional API, recorded and not, and whoever else computes it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import normforge
from normforge import reference
from normforge.codegen.values import Cast

from ..calling import (
    BACKWARD_ORACLE,
    FLOATS,
    FORWARD,
    FUNCTIONS,
    LENGTHS,
    ORACLE,
    backward,
    backward_operands,
    check,
    check_backward,
    each_device,
    each_function,
    each_norm,
    each_pipeline,
    pieces,
    there,
)

M, N = 8, 300

HALVES = [torch.float16, torch.bfloat16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


def run(norm: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, cast: Any) -> torch.Tensor:
    """What a function of FUNCTIONS returns as y."""
    given = (x, residual) if norm.startswith("add") else (x, weight.shape)
    return pieces(FUNCTIONS[norm](*given, weight, eps=1e-5, cast=cast))[0]


def oracle(norm: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> reference.ReferenceOutput:
    add: dict[str, Any] = {"residual": residual, "fadd": "pre_add_store"} if norm.startswith("add") else {}
    return ORACLE[norm.removeprefix("add_")](x, weight, eps=1e-5, cast="before_weight", save_mv=True, **add)


@each_device
@each_pipeline
@each_half
@each_function
def test_two_roundings_to_the_bit_and_the_weights_gradient_of_the_first(
    norm: str, dtype: torch.dtype, n: int, device: str
) -> None:
    x, residual = (torch.randn(M, n, device=device).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(n, device=device).to(dtype).requires_grad_()
    y = run(norm, x, residual, weight, "before_weight")
    expected: Any = oracle(norm, x.detach(), residual.detach(), weight.detach())
    # With a weight of 16 bits the product is exact in fp32, and a row is rounded as the oracle's but where it may be
    # rounded either way.
    told = there(expected.open) == 0
    assert told.float().mean() > 0.5
    assert torch.equal(y[told], expected.y[told])
    assert not torch.equal(y, run(norm, x, residual, weight, "after_weight"))
    with torch.no_grad():
        assert torch.equal(y, run(norm, x, residual, weight, Cast.BEFORE_WEIGHT))

    dy = torch.randn(M, n, device=device).to(dtype)
    backward(y, dy)
    # What is read again of a fused add is the sum as it was stored.
    stored = x.detach() if expected.residual_out is None else expected.residual_out
    statistics = {"rstd": expected.rstd} | ({} if expected.mean is None else {"mean": expected.mean})
    gradients = BACKWARD_ORACLE[norm.removeprefix("add_")](dy, stored, **statistics, cast="before_weight")
    allowed = (
        torch.finfo(dtype).eps * gradients.dweight.abs()
        + there(gradients.open)
        + 1e-5 * gradients.magnitudes["dweight"]
    )
    assert bool(((there(weight.grad).double() - gradients.dweight).abs() <= allowed).all())


@each_pipeline
def test_a_row_is_rounded_before_it_is_quantised(n: int) -> None:
    """Of short rows so many that a program takes several; of others each takes one."""
    m = 300 if n == LENGTHS["rows"] else 2
    for norm, dtype, out in product(FORWARD, HALVES, (torch.int8, torch.float8_e4m3fnuz)):
        x = (torch.randn(m, n) * 3 + 1).to(dtype)
        for weight in (torch.randn(n), None):
            check(norm, x, weight, cast="before_weight", fquant="dynamic", out_dtype=out)


@pytest.mark.parametrize("dy", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_pipeline
def test_dweight_is_of_the_rounded_row_and_dx_of_the_row(n: int, dtype: torch.dtype, dy: torch.dtype) -> None:
    for norm, offset in (("layer", {}), ("rms", {"weight_offset": 0.5})):
        given = backward_operands(norm, M, n)
        given |= {"x": given["x"].to(dtype), "dy": given["dy"].to(dy), "x_bias": None, "dresidual_out": None}
        check_backward(norm, **given, **offset, cast="before_weight", wants=("dx", "dweight"))


@each_norm
def test_of_fp32_alone_nothing_is_rounded_and_the_usual_kernel_serves(norm: str) -> None:
    x, weight = torch.randn(M, N), torch.randn(N)
    asked: dict[str, Any] = {"norm": norm, "cast": "before_weight"}
    assert normforge.which(x, weight, **asked) == normforge.which(x, weight, norm=norm)
    assert "_cbw" in normforge.which(x, weight, **asked, out_dtype=torch.float16)
    assert "_cbw" in normforge.which(x.half(), weight, **asked, out_dtype=torch.float32)
    quantised: dict[str, Any] = {"fquant": "dynamic", "out_dtype": torch.int8}
    assert "_cbw" not in normforge.which(x, weight, **asked, **quantised)
    assert "_cbw" in normforge.which(x.half(), weight, **asked, **quantised)


def test_of_fp32_rows_nothing_is_rounded_whatever_their_sum_is_stored_in() -> None:
    x, weight = torch.randn(M, N), torch.randn(N)
    residual, dy = torch.randn(M, N).bfloat16(), torch.randn(M, N)
    found = []
    for cast in ("before_weight", "after_weight"):
        leaf = weight.clone().requires_grad_()
        y, _ = normforge.add_rms_norm(x, residual, leaf, 1e-5, cast=cast)
        backward(y, dy)
        found.append((y, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)


@each_half
@each_function
def test_torchs_operators_compute_the_same_where_kernels_cannot(norm: str, dtype: torch.dtype) -> None:
    """In a transform of torch.func; with a mean of no rounding and weights of 16 bits, to the bit but for ties."""
    x, residual = torch.randn(M, N).to(dtype), torch.randn(M, N).to(dtype)
    weight = torch.randn(N).to(dtype)
    mapped = torch.func.vmap(lambda row, other: run(norm, row, other, weight, "before_weight"))(x, residual)
    y = run(norm, x, residual, weight, "before_weight")
    assert mapped.dtype is y.dtype
    expected = oracle(norm, x, residual, weight)
    told = there(expected.open) == 0
    assert torch.equal(mapped[told], y[told])


@each_half
@each_norm
def test_gradients_of_several_at_once(norm: str, dtype: torch.dtype) -> None:
    """Which torch's operators compute: none of a row's own memory is there for a kernel to read."""
    x, weight = torch.randn(M, N).to(dtype), torch.randn(N, requires_grad=True)
    arriving = torch.randn(3, M, N).to(dtype)
    y = run(norm, x, x, weight, "before_weight")
    (batched,) = torch.autograd.grad(y, weight, arriving, is_grads_batched=True, retain_graph=True)
    one_by_one = torch.stack([torch.autograd.grad(y, weight, dy, retain_graph=True)[0] for dy in arriving])
    torch.testing.assert_close(batched, one_by_one, rtol=1e-5, atol=1e-4)

"""Calls whose rows' results are compared between batches, and rows that are hard to add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch

import normforge

from ..calling import same_bits, there

Results = dict[str, torch.Tensor]
Call = Callable[[torch.Tensor], Results]


def rows(m: int, n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """Noise, and among it what makes sums cancel: a large mean, an outlier, values of all sizes."""
    generator = torch.Generator(device).manual_seed(n)
    x = torch.randn(m, n, generator=generator, device=device)
    x[1::5] += 1000.0
    x[2::5, 0] = 3e4
    x[3::5] *= torch.logspace(-6, 3, n, device=device)
    return x.to(dtype)


def vector(seed: int, like: torch.Tensor) -> torch.Tensor:
    return _vector(seed, like.shape[-1], like.dtype, like.device)


# Drawn once: no generator can be made while a CUDA graph is captured.
@cache
def _vector(seed: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(n, generator=generator, device=device).to(dtype)


# Likewise, on a device.
@cache
def value(of: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([of], device=device)


def named(results: Any) -> Results:
    return {name: tensor for name, tensor in results._asdict().items() if tensor is not None}


def plain(x: torch.Tensor) -> Results:
    return named(normforge.layernorm2d_fwd(x, vector(1, x), vector(2, x), save_mv=True))


def root_mean_square(x: torch.Tensor) -> Results:
    others = {"of length 1": normforge.l2_norm(x, vector(1, x)), "rstd alone": normforge.rms_statistics(x)}
    return named(normforge.rmsnorm2d_fwd(x, vector(1, x), save_mv=True)) | others


def statistics(x: torch.Tensor) -> Results:
    return dict(zip(("mean", "rstd"), normforge.layer_statistics(x), strict=True))


def added(x: torch.Tensor) -> Results:
    found = named(normforge.layernorm2d_fwd(x, vector(1, x), residual=x.flip(-1), fadd="pre_add_store"))
    return found | {"behind": normforge.layer_norm_add(x, x.flip(-1), vector(1, x))}


def quantised(x: torch.Tensor) -> Results:
    smooth: Any = {"fquant": "smooth_dynamic", "smooth_scale": vector(3, x).float()}
    return named(normforge.rmsnorm2d_fwd(x, vector(1, x), residual=x.flip(-1), fadd="pre_add_store", **smooth))


def in_groups(x: torch.Tensor) -> Results:
    fp8: Any = {"group_size": 64, "out_dtype": torch.float8_e4m3fn, "scale_layout": "column_major"}
    return named(normforge.quantised_layer_norm(x, vector(1, x), residual=x.flip(-1), **fp8))


def by_given_scale(x: torch.Tensor) -> Results:
    scale = value(0.05, x.device)
    return named(normforge.quantised_rms_norm(x, vector(1, x), fquant="static", y_scale=scale, save_unquant=True))


def stored_twice(x: torch.Tensor) -> Results:
    return named(normforge.quantised_rms_norm(x, vector(1, x), x_bias=vector(2, x), save_unquant=True))


def as_nvfp4(x: torch.Tensor) -> Results:
    """Of an even number of columns, and y as bytes: torch copies no fp4."""
    x = x[..., : x.shape[-1] // 2 * 2]
    fp4: Any = {"group_size": 16, "scale_format": "e4m3", "out_dtype": torch.float4_e2m1fn_x2, "save_unquant": True}
    found = normforge.quantised_rms_norm(x, vector(1, x), global_scale=value(448.0, x.device), **fp4)
    return named(found._replace(y=found.y.view(torch.uint8)))


def backward(x: torch.Tensor) -> Results:
    _, _, _, mean, rstd = normforge.layernorm2d_fwd(x, vector(1, x), save_mv=True)
    found = normforge.layernorm2d_bwd(x.flip(-1), x, vector(1, x), mean=there(mean), rstd=there(rstd))
    return {"dx": there(found.dx)}


def added_backward(x: torch.Tensor) -> Results:
    rstd = normforge.rmsnorm2d_fwd(x, save_mv=True).rstd
    found = normforge.rmsnorm2d_bwd(x.flip(-1), x, vector(1, x), rstd=there(rstd), dresidual_out=x)
    return {"dx": there(found.dx)}


def gated(x: torch.Tensor) -> Results:
    leaf, gate = x.detach().requires_grad_(), x.flip(-1).clamp(-50, 50).requires_grad_()
    y = normforge.gated_rms_norm(leaf, gate, vector(1, x))
    dx, dgate = torch.autograd.grad(y, (leaf, gate), x.flip(-1).contiguous())
    return {"y": y.detach(), "dx": dx, "dgate": dgate}


def renormed(x: torch.Tensor) -> Results:
    return named(normforge.renormed_layernorm2d_fwd(x, x.flip(-1), weight=vector(1, x), save_mv=True))


def renormed_backward(x: torch.Tensor) -> Results:
    leaf, residual = x.detach().requires_grad_(), x.flip(-1).requires_grad_()
    y, total = normforge.rms_norm_add(leaf, residual, vector(1, x), next_weight=vector(2, x))
    dx, dresidual = torch.autograd.grad((y, total), (leaf, residual), (x.flip(-1).contiguous(), x))
    return {"y": y.detach(), "residual_out": total.detach(), "dx": dx, "dresidual": dresidual}


FORWARD = (plain, root_mean_square, statistics, added, quantised)
# What engines ask for; mostly with y in x's dtype too: few bits may hide that a row was added up otherwise.
SERVING = (in_groups, by_given_scale, stored_twice, as_nvfp4)
TWICE = (renormed, renormed_backward)
CALLS: Mapping[str, Call] = {
    call.__name__: call for call in (*FORWARD, *SERVING, backward, added_backward, gated, *TWICE)
}


def assert_same(results: Results, batch: Results, at: slice) -> None:
    """Each result has the bits that some rows of a batch have."""
    assert results.keys() == batch.keys()
    for name, tensor in results.items():
        assert same_bits(tensor, batch[name][at]), name


def hold_for(call: Call, x: torch.Tensor, parts: Iterable[tuple[int, int]]) -> None:
    """Some rows of a batch have the same bits in a batch of their own, each from a row to another."""
    batch = call(x)
    for first, last in parts:
        assert_same(call(x[first:last]), batch, slice(first, last))


def hold_wherever_it_lies(call: Call, x: torch.Tensor, beside: Iterable[int], ahead: Iterable[int]) -> None:
    """Between other columns, between other rows, as two of three heads, at some addresses, and all one row."""
    m, n = x.shape
    batch = call(x)
    for columns in beside:
        wide = x.new_zeros(m, n + columns)
        wide[:, :n] = x
        assert_same(call(wide[:, :n]), batch, slice(None))
    every_other = x.new_zeros(2 * m, n)
    every_other[::2] = x
    assert_same(call(every_other[::2]), batch, slice(None))
    heads = x.new_zeros(m // 2, 3, n)
    heads[:, :2] = x.view(m // 2, 2, n)
    found = {name: each.reshape(m, *each.shape[2:]) for name, each in call(heads[:, :2]).items()}
    assert_same(found, batch, slice(None))
    for elements in ahead:
        assert_same(call(x.new_zeros(m * n + elements)[elements:].view(m, n).copy_(x)), batch, slice(None))
    repeated = {name: each[3:4].expand(5, *each.shape[1:]) for name, each in batch.items()}
    assert_same(call(x[3:4].expand(5, n)), repeated, slice(None))


def group(x: torch.Tensor) -> Results:
    """A group norm's y, and the gradient of x where x is what arrives."""
    leaf = x.detach().requires_grad_()
    y = normforge.group_norm(leaf, 16, activation="silu")
    return {"y": y.detach(), "dx": torch.autograd.grad(y, leaf, x)[0]}

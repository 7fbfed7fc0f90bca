"""Compute the expected results of every call in fp64, from the formulas and sharing no code with normforge.

LayerNorm: Ba et al., 2016, eq. 3-4, with the biased variance. RMSNorm: Zhang and Sennrich, 2019, eq. 4. A quantised row
is divided by max|z| / qmax, as ck_tile's `02_layernorm2d` does it. Rows are independent, so callers may pass a few at
a time, except that gradients of weight and bias are then parts of a sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# The largest value of each type that a row is scaled to.
QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2: 57344.0}

# How far off fp32 arithmetic may leave a normalised value: so much, and so much of itself.
FP32_ERROR = (2e-5, 1e-5)


class Forward(NamedTuple):
    """The expected results of a forward call, in fp64 where it is rounded once more.

    Attributes:
        s: (m, N): x and all that is added to it, rounded as it is stored if it is stored.
        z: (m, N): y, times smooth_scale, before it is rounded or quantised.
        mean: (m, 1); 0 for RMSNorm.
        rstd: (m, 1).
        residual_out: (m, N), in residual's dtype, or None.
        y_scale: (m,), in the scale's dtype, or None.
        open: (m, N): how far off z may be where fp32 leaves open which way a row is rounded before the weight.
        scale_open: (m,): how far off y_scale may be for the same reason.
    """

    s: torch.Tensor
    z: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    residual_out: torch.Tensor | None
    y_scale: torch.Tensor | None
    open: torch.Tensor | float = 0.0
    scale_open: torch.Tensor | float = 0.0


def first_rounded(h: torch.Tensor, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return a normalised row in a 16-bit type, in fp64 again, and how far off it may be near a tie in fp32."""
    if dtype is None:
        return h, 0.0
    absolute, relative = FP32_ERROR
    error = absolute + relative * h.abs()
    low, nearest, high = ((h + shift * error).to(dtype).double() for shift in (-1, 0, 1))
    return nearest, torch.maximum(high - nearest, nearest - low)


def forward(
    x: torch.Tensor,
    *,
    centres: bool,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
    stores: bool = False,
    x_bias: torch.Tensor | None = None,
    smooth_scale: torch.Tensor | None = None,
    quantised: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    rounds_first: torch.dtype | None = None,
) -> Forward:
    """Return the expected results of a call of x, (m, N), and these operands; `centres` is LayerNorm.

    With `stores` the sum with the residual is returned, and the norm is of it as it is returned.
    With `rounds_first` rows are rounded to it before the weight, as Hugging Face's Llama and T5 have it.
    """
    added = [tensor for tensor in (x_bias, residual) if tensor is not None]
    s = x.double()
    for tensor in added:
        s = s + tensor.double()
    residual_out = None
    if residual is not None and stores:
        # What is stored is defined in fp32, and has to be equal to the bit.
        total = x.float()
        for tensor in added:
            total = total + tensor.float()
        residual_out = total.to(residual.dtype)
        s = residual_out.double()
    mean = s.mean(-1, keepdim=True) if centres else torch.zeros_like(s[..., :1])
    rstd = ((s - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    z, either = first_rounded((s - mean) * rstd, rounds_first)
    if weight is not None:
        factor = weight.double() + weight_offset
        z, either = z * factor, either * factor.abs()
    if bias is not None:
        z = z + bias.double()
    if smooth_scale is not None:
        z, either = z * smooth_scale.double(), either * smooth_scale.double().abs()
    y_scale = None
    scale_open: torch.Tensor | float = 0.0
    if quantised is not None:
        low, amax, high = ((z.abs() + shift * either).amax(-1) for shift in (-1, 0, 1))
        scale_open = torch.maximum(high - amax, amax - low) / QMAX[quantised]
        scale = z.abs().amax(-1) / QMAX[quantised]
        if scale_dtype is torch.float16:
            # A multiple of its smallest number that is no less, so that z / y_scale is no more than qmax.
            scale = torch.where(scale < 2.0**-14, torch.ceil(scale * 2.0**24) / 2.0**24, scale)
        y_scale = torch.where(scale == 0, 1.0, scale).to(scale_dtype)
    return Forward(s, z, mean, rstd, residual_out, y_scale, either, scale_open)


def quantise(ratio: torch.Tensor, dtype: torch.dtype, rounding: str = "nearest") -> torch.Tensor:
    """Give z / y_scale as the quantised type stores it: rounded to nearest even, or int8 toward zero, and saturated."""
    held = ratio.clamp(-QMAX[dtype], QMAX[dtype])
    if dtype is torch.int8:
        return (held.trunc() if rounding == "truncate" else held.round()).to(torch.int8)
    return held.to(dtype)


class Backward(NamedTuple):
    """Gradients in fp64, and for each what its terms add up to without their signs.

    Attributes:
        dx: (m, N): of x, and of a residual that was added to it.
        dweight: (N,): summed over these rows.
        dbias: (N,): summed over these rows.
        magnitudes: by name.
        open: (N,): how far off dweight may be where fp32 leaves open which way h is rounded before the weight.
    """

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor
    magnitudes: dict[str, torch.Tensor]
    open: torch.Tensor


def backward(
    s: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    centres: bool,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounds_first: torch.dtype | None = None,
) -> Backward:
    """Return the gradients of a call that normalised s, (m, N), by mean and rstd, (m, 1); see `Forward`.

    A rounding before the weight is no change to dx, as it is none to autograd.
    """
    h = (s - mean) * rstd
    dy = torch.zeros_like(s) if dy is None else dy.double()
    g = dy if weight is None else dy * (weight.double() + weight_offset)
    dx = g - h * (g * h).mean(-1, keepdim=True)
    terms = g.abs() + h.abs() * (g * h).abs().mean(-1, keepdim=True)
    if centres:
        dx = dx - g.mean(-1, keepdim=True)
        terms = terms + g.abs().mean(-1, keepdim=True)
    dx, terms = dx * rstd, terms * rstd
    if dresidual_out is not None:
        dx, terms = dx + dresidual_out.double(), terms + dresidual_out.double().abs()
    # h is the difference of s and a mean, each rounded: what it may be off by does not shrink with it.
    rounded = h.abs() + 1 + mean.abs() * rstd
    magnitudes = {"dx": terms, "dweight": (dy.abs() * rounded).sum(0), "dbias": dy.abs().sum(0)}
    weighted, either = first_rounded(h, rounds_first)
    return Backward(dx, (dy * weighted).sum(0), dy.sum(0), magnitudes, (dy.abs() * either).sum(0))

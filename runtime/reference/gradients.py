"""The oracle of gradients, in plain torch, in the dtype asked; see `layernorm2d_bwd` for the formulas' source."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..codegen.values import Cast
from ..dtypes import HALVES, word
from ..random_mask import dropout_mask, kept_factor

# How far a row that was normalised in fp32 may be off, beside 1 and beside its values.
_NORMALISED = 1e-5


class ReferenceGradients(NamedTuple):
    """Gradients in the arithmetic dtype, and for each the magnitudes it is a sum of.

    Attributes:
        dx: x's shape.
        dweight: (N,).
        dbias: (N,); None for RMSNorm.
        dx_bias: (N,): dx summed over rows, or ddropped.
        magnitudes: gradient name to a tensor of its shape: what its terms add up to without their signs, which is
            what the rounding errors of fp32 sums are proportional to.
        open: with cast "before_weight", how far off dweight may be because fp32 leaves open which way some of h is
            rounded; else None.
        ddropped: x's shape, of what a dropout was applied to; None where there was none.
    """

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor | None
    dx_bias: torch.Tensor
    magnitudes: dict[str, torch.Tensor]
    open: torch.Tensor | None = None
    ddropped: torch.Tensor | None = None


def layernorm2d_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x_bias: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: torch.Tensor | None = None,
    cast: str | Cast = "after_weight",
    dtype: torch.dtype = torch.float64,
) -> ReferenceGradients:
    """Compute every gradient that `normforge.layernorm2d_bwd` of the same arguments could return.

    The arithmetic is in `dtype`; every other argument is as there.
    """
    s = _sum(x, x_bias, dtype)
    h = (s - mean.to(dtype).unsqueeze(-1)) * rstd.to(dtype).unsqueeze(-1)
    g = dy.to(dtype) if weight is None else dy.to(dtype) * weight.to(dtype)
    dx = (g - h * (g * h).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)) * rstd.to(dtype).unsqueeze(-1)
    cast_to = (word(Cast, "cast", cast), dy.dtype, x.dtype)
    kept = _kept(x, dropout_p, dropout_rng)
    return _finish(dy.to(dtype), dx, h, g, rstd.to(dtype), dresidual_out, cast_to, kept, has_bias=True)


def rmsnorm2d_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    rstd: torch.Tensor,
    averages: bool = True,
    weight_offset: float = 0.0,
    x_bias: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: torch.Tensor | None = None,
    cast: str | Cast = "after_weight",
    dtype: torch.dtype = torch.float64,
) -> ReferenceGradients:
    """Compute every gradient that `normforge.rmsnorm2d_bwd` of the same arguments could return.

    averages is that of the forward call: see `reference.rmsnorm2d_fwd`.
    """
    h = _sum(x, x_bias, dtype) * rstd.to(dtype).unsqueeze(-1)
    g = dy.to(dtype) if weight is None else dy.to(dtype) * (weight.to(dtype) + weight_offset)
    count = x.shape[-1] if averages else 1
    dx = (g - h * (g * h).sum(-1, keepdim=True) / count) * rstd.to(dtype).unsqueeze(-1)
    cast_to = (word(Cast, "cast", cast), dy.dtype, x.dtype)
    kept = _kept(x, dropout_p, dropout_rng)
    return _finish(dy.to(dtype), dx, h, g, rstd.to(dtype), dresidual_out, cast_to, kept, has_bias=False, count=count)


def rounded_first(
    h: torch.Tensor, cast: Cast, y_dtype: torch.dtype, x_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The normalised row as the weight finds it; to autograd the rounding is no change.

    Args:
        h: the normalised row, in the arithmetic dtype.
        cast: whether it is rounded first.
        y_dtype: y's dtype, or dy's. Of 16 bits, it is what is rounded to.
        x_dtype: x's, which is rounded to otherwise if it has 16 bits.

    Returns:
        The row, and how far off it may be where fp32 leaves open which way it is rounded: None if it is not rounded.
    """
    halves = [dtype for dtype in (y_dtype, x_dtype) if dtype in HALVES]
    if not cast.comes_first or not halves:
        return h, None

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(halves[0]).to(h.dtype)

    exact = h.detach()
    nearest, error = rounded(exact), _NORMALISED * (1 + exact.abs())
    either = torch.maximum(rounded(exact + error) - nearest, nearest - rounded(exact - error))
    return h + (nearest - exact), either


def _sum(x: torch.Tensor, x_bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if x_bias is None:
        return x.to(dtype)
    # The sum is defined in fp32, whatever the arithmetic here: near the mean, where (s - mean) cancels, its rounding
    # is all the error that dweight has, and is far above what `magnitudes` allow for (one in fifty rows of 64 had such
    # a column).
    widest = torch.promote_types(torch.promote_types(x.dtype, x_bias.dtype), torch.float32)
    return (x.to(widest) + x_bias.to(widest)).to(dtype)


def _finish(
    dy: torch.Tensor,
    dx: torch.Tensor,
    h: torch.Tensor,
    g: torch.Tensor,
    rstd: torch.Tensor,
    dresidual_out: torch.Tensor | None,
    cast_to: tuple[Cast, torch.dtype, torch.dtype],
    kept: torch.Tensor | None,
    *,
    has_bias: bool,
    count: int | None = None,
) -> ReferenceGradients:
    along = (g * h).abs().sum(-1, keepdim=True) / (count or h.shape[-1])
    terms = (g.abs() + h.abs() * along + g.abs().mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if dresidual_out is not None:
        dx = dx + dresidual_out.to(dx.dtype)
        terms = terms + dresidual_out.to(dx.dtype).abs()
    weighted, either = rounded_first(h, *cast_to)
    ddropped = None if kept is None else dx * kept
    of_ddropped = terms if kept is None else terms * kept
    return ReferenceGradients(
        dx=dx,
        dweight=_over_rows(dy * weighted),
        dbias=_over_rows(dy) if has_bias else None,
        dx_bias=_over_rows(dx if ddropped is None else ddropped),
        magnitudes={
            "dx": terms,
            "dweight": _over_rows((dy * h).abs()),
            "dbias": _over_rows(dy.abs()),
            "dx_bias": _over_rows(of_ddropped),
            "ddropped": of_ddropped,
        },
        open=None if either is None else _over_rows(dy.abs() * either),
        ddropped=ddropped,
    )


def _kept(x: torch.Tensor, dropout_p: float, dropout_rng: torch.Tensor | None) -> torch.Tensor | None:
    """What each element of what was dropped was multiplied by: 0 or 1 / (1 - p)."""
    if dropout_rng is None:
        return None
    return dropout_mask(x.shape, dropout_p, dropout_rng).double() * kept_factor(dropout_p, x.device)


def _over_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).sum(0)

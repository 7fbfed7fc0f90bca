"""The oracle of gradients, in plain torch, in the dtype asked; see `layernorm2d_bwd` for the formulas' source."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..codegen.values import Cast
from ..dtypes import dequantised, rounded_to, word
from ..random_mask import dropout_mask, kept_factor

# How far a row that was normalised in fp32 may be off, beside 1 and beside its values.
_NORMALISED = 1e-5


class ReferenceGradients(NamedTuple):
    """Gradients in the arithmetic dtype, in the shapes of their operands, each with the magnitudes of its terms.

    A gradient of an operand that the norm lacks is None.

    Attributes:
        dx: the gradient of x.
        dweight: the gradient of the weight, also if there is no weight, which is then 1.
        dbias: the gradient of the bias, also if there is no bias; None for RMSNorm.
        magnitudes: by the name of a gradient, the sum of the gradient's terms without their signs: the rounding errors
            of fp32 sums are proportional to these sums.
        open: with cast "before_weight", how far off dweight may be because fp32 leaves open which way some of h is
            rounded; else None.
        dx_bias: dx or, after a dropout, ddropped, summed over rows.
        ddropped: the gradient of the rows that a dropout was applied to.
        dgate: the gradient of a gate.
        dscale: the gradient of a modulation's scale.
        dshift: the gradient of a modulation's shift.
        dresidual: the gradient of the sum that a modulated norm normalises.
    """

    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor | None
    magnitudes: dict[str, torch.Tensor]
    open: torch.Tensor | None = None
    dx_bias: torch.Tensor | None = None
    ddropped: torch.Tensor | None = None
    dgate: torch.Tensor | None = None
    dscale: torch.Tensor | None = None
    dshift: torch.Tensor | None = None
    dresidual: torch.Tensor | None = None


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor,
    averages: bool = True,
    weight_offset: float = 0.0,
    x_bias: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_rng: torch.Tensor | None = None,
    cast: str | Cast = "after_weight",
    dy_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> ReferenceGradients:
    """Compute every gradient that `normforge.layernorm2d_bwd` or `rmsnorm2d_bwd` of the same arguments could return.

    A norm centres rows where there is a mean. averages is that of the norm; `cast` is that of the forward call; the
    arithmetic is done in `dtype`.
    """
    # A negative rstd is that of a row whose norm was clamped, and is no function of the row.
    d, clamped = dequantised(dy, dy_scale).to(dtype), rstd.unsqueeze(-1) < 0
    rstd = rstd.to(dtype).unsqueeze(-1).abs()
    s = _sum(x, x_bias, dtype)
    h = (s if mean is None else s - mean.to(dtype).unsqueeze(-1)) * rstd
    g = d if weight is None else d * (weight.to(dtype) + weight_offset)
    count = x.shape[-1] if averages else 1
    through = h.masked_fill(clamped, 0.0)
    dx, terms = through_statistics(g, g.abs(), through, rstd, count=count, centres=mean is not None)
    if dresidual_out is not None:
        dx = dx + dresidual_out.to(dtype)
        terms = terms + dresidual_out.to(dtype).abs()
    weighted, either = rounded_first(h, word(Cast, "cast", cast), dy.dtype, x.dtype)
    ddropped, of_ddropped = None, terms
    if dropout_rng is not None:
        # The dropout's factor of each element: 0 or 1 / (1 - p).
        kept = dropout_mask(x.shape, dropout_p, dropout_rng).double() * kept_factor(dropout_p, x.device)
        ddropped, of_ddropped = dx * kept, terms * kept
    return ReferenceGradients(
        dx=dx,
        dweight=_over_rows(d * weighted),
        dbias=None if mean is None else _over_rows(d),
        dx_bias=_over_rows(dx if ddropped is None else ddropped),
        magnitudes={
            "dx": terms,
            "dweight": _over_rows((d * h).abs()),
            "dbias": _over_rows(d.abs()),
            "dx_bias": _over_rows(of_ddropped),
            "ddropped": of_ddropped,
        },
        open=None if either is None else _over_rows(d.abs() * either),
        ddropped=ddropped,
    )


layernorm2d_bwd = rmsnorm2d_bwd = backward


def through_statistics(
    g: torch.Tensor, of_g: torch.Tensor, h: torch.Tensor, rstd: torch.Tensor, *, count: int, centres: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of rows from the gradients of the normalised rows, and the magnitudes of the gradients.

    Args:
        g: the gradients of the normalised rows.
        of_g: the magnitudes of g.
        h: the normalised rows.
        rstd: the reciprocal standard deviation per row, (..., 1).
        count: the divisor of the sum of squares.
        centres: whether the mean was subtracted.
    """
    dx = g - h * (g * h).sum(-1, keepdim=True) / count
    dx = (dx - g.mean(-1, keepdim=True) if centres else dx) * rstd
    along = (of_g * h.abs()).sum(-1, keepdim=True) / count
    return dx, (of_g + h.abs() * along + of_g.mean(-1, keepdim=True)) * rstd


def rounded_first(
    h: torch.Tensor, cast: Cast, y_dtype: torch.dtype, x_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the normalised row that the weight multiplies; autograd sees the rounding as the identity.

    Args:
        h: the normalised row, in the arithmetic dtype.
        cast: whether it is rounded first.
        y_dtype: y's dtype, or dy's. Of 16 bits, it is what is rounded to.
        x_dtype: x's, which is rounded to otherwise if it has 16 bits.

    Returns:
        The row, and how far off it may be where fp32 leaves open which way it is rounded: None if it is not rounded.
    """
    half = rounded_to(cast, y_dtype, x_dtype)
    if half is None:
        return h, None

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(half).to(h.dtype)

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


def _over_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).sum(0)

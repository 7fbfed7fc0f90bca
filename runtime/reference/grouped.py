"""The oracle of GroupNorm (Wu and He, 2018) and of norms over channels, forward and backward, in plain torch."""

from __future__ import annotations

import torch

from ..codegen.groups import Span
from .gradients import ReferenceGradients, through_statistics


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute in fp64 what `normforge.group_norm` should return, unrounded.

    `Span.of` says what norms over channels pass as num_groups.
    """
    z = _affine(_normalised(x, num_groups, eps)[0], weight, bias)
    return z * torch.sigmoid(z) if activation == "silu" else z


def group_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
) -> ReferenceGradients:
    """Compute in fp64 what its gradients should be, unrounded."""
    span, (h, rstd) = Span.of(num_groups), _normalised(x, num_groups, eps)
    dz = dy.double()
    terms = dz.abs()
    if activation == "silu":
        z = _affine(h, weight, bias)
        sigmoid = torch.sigmoid(z)
        dz = dz * (sigmoid + z * sigmoid * (1 - sigmoid))
        terms = terms * (sigmoid + z.abs() * sigmoid * (1 - sigmoid))
    g = _rows(_affine(dz, weight, None), num_groups)
    of_g = _rows(_affine(terms, None if weight is None else weight.abs(), None), num_groups)
    # A row whose norm was clamped is divided by a constant.
    through = _rows(h, num_groups).masked_fill(rstd == 1 / eps if span.norm.clamps else rstd < 0, 0.0)
    count = g.shape[-1] if span.norm.averages else 1
    dx, of_dx = through_statistics(g, of_g, through, rstd, count=count, centres=span.centres)
    others = [dim for dim in range(x.dim()) if dim != 1]
    return ReferenceGradients(
        _images(dx, x, num_groups),
        (dz * h).sum(others),
        dz.sum(others) if span.centres else None,
        {
            "dx": _images(of_dx, x, num_groups),
            "dweight": (terms * h.abs()).sum(others),
            "dbias": terms.sum(others),
        },
    )


def _normalised(x: torch.Tensor, num_groups: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised values in x's shape, and rstd per row of `_rows`."""
    span, rows = Span.of(num_groups), _rows(x.double(), num_groups)
    centred = rows - rows.mean(-1, keepdim=True) if span.centres else rows
    squares = centred.square().sum(-1, keepdim=True) / (rows.shape[-1] if span.norm.averages else 1)
    rstd = 1 / squares.sqrt().clamp(min=eps) if span.norm.clamps else (squares + eps).rsqrt()
    return _images(centred * rstd, x, num_groups), rstd


def _rows(images: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return what shares statistics along the last dimension: (samples, groups, ...), or (samples, ..., channels)."""
    return images.reshape(len(images), num_groups, -1) if num_groups > 0 else images.movedim(1, -1)


def _images(rows: torch.Tensor, x: torch.Tensor, num_groups: int) -> torch.Tensor:
    return rows.reshape(x.shape) if num_groups > 0 else rows.movedim(-1, 1)


def _affine(values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    shape = (-1, *[1] * (values.dim() - 2))
    scaled = values if weight is None else values * weight.double().reshape(shape)
    return scaled if bias is None else scaled + bias.double().reshape(shape)

"""The oracle of GroupNorm, forward and backward, in plain torch and by its formulas (Wu and He, 2018)."""

from __future__ import annotations

import torch

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
    """Compute in fp64 what `normforge.group_norm` should return, unrounded."""
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
    h, rstd = _normalised(x, num_groups, eps)
    dz = dy.double()
    terms = dz.abs()
    if activation == "silu":
        z = _affine(h, weight, bias)
        sigmoid = torch.sigmoid(z)
        dz = dz * (sigmoid + z * sigmoid * (1 - sigmoid))
        terms = terms * (sigmoid + z.abs() * sigmoid * (1 - sigmoid))
    g = _affine(dz, weight, None).reshape(x.shape[0], num_groups, -1)
    of_g = _affine(terms, None if weight is None else weight.abs(), None).reshape(g.shape)
    dx, of_dx = through_statistics(g, of_g, h.reshape(g.shape), rstd, count=g.shape[-1])
    others = [dim for dim in range(x.dim()) if dim != 1]
    return ReferenceGradients(
        dx.reshape(x.shape),
        (dz * h).sum(others),
        dz.sum(others),
        {
            "dx": of_dx.reshape(x.shape),
            "dweight": (terms * h.abs()).sum(others),
            "dbias": terms.sum(others),
        },
    )


def _normalised(x: torch.Tensor, num_groups: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised values in x's shape, and rstd per group, (samples, groups, 1)."""
    groups = x.double().reshape(x.shape[0], num_groups, -1)
    centred = groups - groups.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (centred * rstd).reshape(x.shape), rstd


def _affine(values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    shape = (-1, *[1] * (values.dim() - 2))
    scaled = values if weight is None else values * weight.double().reshape(shape)
    return scaled if bias is None else scaled + bias.double().reshape(shape)

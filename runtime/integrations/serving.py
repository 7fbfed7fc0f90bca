"""What a plug may take over from an engine's norm, and the call that serves it."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.attempt import attempted
from ..calls.straight import layernorm2d_fwd, rmsnorm2d_fwd
from ..dtypes import FLOATS

_FLOATS = frozenset(FLOATS)

Found = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def fits(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> bool:
    """Whether a norm over x's last dimension is one that a kernel computes, and no gradient is due.

    Weight and bias are vectors of x's dtype or fp32, and residual is like x.
    """
    return (
        x.dtype in _FLOATS
        and x.dim() > 0
        and not (torch.is_grad_enabled() and x.requires_grad)
        and (residual is None or (residual.dtype is x.dtype and residual.shape == x.shape))
        and all(
            vector is None or (vector.dtype in (x.dtype, torch.float32) and vector.shape == x.shape[-1:])
            for vector in (weight, bias)
        )
    )


def rms(
    engine: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    cast: str = "after_weight",
) -> Found | None:
    """RMSNorm of x, or of x + residual with that sum beside it; None if the engine has to compute it itself."""
    if is_dynamo_compiling():
        return _rms(x, weight, residual, eps, weight_offset, cast)
    return attempted(_leaves(engine), _rms, x, weight, residual, eps, weight_offset, cast)


def layer(
    engine: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor | None:
    """LayerNorm of x; None if the engine has to compute it itself."""
    if is_dynamo_compiling():
        return _layer(x, weight, bias, eps)
    return attempted(_leaves(engine), _layer, x, weight, bias, eps)


def _leaves(engine: str) -> str:
    return f"normforge leaves calls to {engine}'s own norms"


def _rms(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    cast: str,
) -> Found:
    if residual is None:
        return rmsnorm2d_fwd(x, weight, eps=eps, weight_offset=weight_offset, cast=cast).y
    out = rmsnorm2d_fwd(
        x, weight, eps=eps, weight_offset=weight_offset, cast=cast, residual=residual, fadd="pre_add_store"
    )
    assert out.residual_out is not None
    return out.y, out.residual_out


def _layer(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return layernorm2d_fwd(x, weight, bias, eps=eps).y

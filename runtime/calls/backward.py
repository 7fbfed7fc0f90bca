"""Gradients of LayerNorm and RMSNorm: a persistent kernel that leaves partial sums, and one that adds them up.

Formulas: with h the normalised row and g = dy * weight, LayerNorm has
dx = (g - h * mean(g * h) - mean(g)) * rstd, RMSNorm the same without mean(g); dweight and dbias are sums of dy * h and
dy over rows (Ba et al., 2016; Triton's layer-norm tutorial derives them).
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from .gradient_arguments import mode_of
from .gradients import backward
from .operands import ZERO, Foreign
from .outputs import NormGradients
from .traced import backward_traced, dispatch_modes, is_dynamo_compiling

__all__ = ["layernorm2d_bwd", "mode_of", "rmsnorm2d_bwd"]


def layernorm2d_bwd(
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x_bias: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    wants: Collection[str] = ("dx",),
) -> NormGradients:
    """Compute the gradients of `layernorm2d_fwd`; two calls of the same arguments return the same bits.

    Args:
        dy: (..., N), fp16, bf16 or fp32: the gradient of y; None counts as zero.
        x: dy's shape, likewise: what was normalised. After a fused add that is residual_out.
        weight: (N,), or None where the forward call had none.
        mean: x's shape without the last dimension, fp32, as the forward call saved it.
        rstd: likewise.
        x_bias: (N,), if the forward call added one to x; leave it out where x is residual_out.
        dresidual_out: x's shape: the gradient of residual_out, added to dx before it is rounded.
        dx_dtype: dx's dtype; None is x's.
        bias_dtype: dbias's dtype; None is weight's, or x's without a weight.
        wants: which of "dx", "dweight", "dbias" and "dx_bias" to compute; nothing else is.

    Returns:
        `NormGradients`. dy is never written to.

    Raises:
        GradientError: a tensor requires a gradient, with gradients enabled: no kernel computes a gradient's gradient.
        NormforgeError: as `layernorm2d_fwd` does for its arguments.
    """
    if not (is_dynamo_compiling() or dispatch_modes()):
        try:
            return backward(
                "layer", dy, x, weight, mean, rstd, False, ZERO, x_bias, dresidual_out, dx_dtype, bias_dtype, wants
            )
        except Foreign:
            # What no kernel takes an operator may.
            pass
    return backward_traced(
        "layer", dy, x, weight, mean, rstd, False, ZERO, x_bias, dresidual_out, dx_dtype, bias_dtype, wants
    )


def rmsnorm2d_bwd(
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    rstd: torch.Tensor,
    weight_offset: float = ZERO,
    x_bias: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
    wants: Collection[str] = ("dx",),
) -> NormGradients:
    """Compute the gradients of `rmsnorm2d_fwd`; see `layernorm2d_bwd`, also for errors."""
    if not (is_dynamo_compiling() or dispatch_modes()):
        try:
            return backward(
                "rms", dy, x, weight, None, rstd, False, weight_offset, x_bias, dresidual_out, dx_dtype, None, wants
            )
        except Foreign:
            # As above.
            pass
    return backward_traced(
        "rms", dy, x, weight, None, rstd, False, weight_offset, x_bias, dresidual_out, dx_dtype, None, wants
    )

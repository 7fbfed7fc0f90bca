"""Differentiable norms that are modulated by sample, as transformers for diffusion condition them (AdaLN)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch

from ...calls import road
from ...calls.record import records
from ...calls.traced import is_dynamo_compiling
from ..operands import ModulatedOperands, ModulatedOptions
from ..plain_functions import handed_on, is_handed_on, normalise_family
from . import row


@overload
def modulated_layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor: ...


@overload
def modulated_layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def modulated_layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute LayerNorm over the last dimension, scaled and shifted per sample: AdaLN of DiT (Peebles and Xie, 2022).

    y = LayerNorm(s) * (1 + scale) + shift of s = x, or s = residual + x * gate, all in fp32, with one rounding. scale,
    shift and gate are usually chunks of one (B, 6 * N) tensor, which the kernel reads in place.

    Differentiable in every tensor. The backward pass saves s as it is stored (x, or residual_out), a gated x, the small
    operands, and a mean and rstd per row. The order of sums does not change from run to run. Torch's operators compute
    a gradient of the gradient, and the gradients of fewer than eight rows per modulation.

    Torch's operators compute the same where kernels cannot run, as described in `layer_norm`. Under torch.autocast y
    has the dtype of the norm alone there.

    Args:
        x: (B, ..., N), fp16, bf16, fp32 or fp64. An x that kernels cannot walk is copied once.
        scale: (B, N), one row per sample; x's shape, one row per row of x; or (N,), one row for all. fp16, bf16, fp32
            or fp64, rows on any stride.
        shift: (B, N), x's shape or (N,), as scale.
        gate: (B, N), x's shape or (N,), as scale, or None for 1; requires residual.
        residual: x's shape, or None for 0.
        weight: (N,), or None for 1.
        bias: (N,), or None for 0.
        eps: added to the variance.

    Returns:
        y: x's shape and dtype. With a residual, y and residual_out: s, in residual's dtype.

    Raises:
        ShapeError: a tensor's shape does not fit x's.
        DTypeError: a tensor is of a type that cannot be normalised.
        DeviceError: tensors are on several devices.
        LayoutError: a tensor is sparse or nested.
        ConflictError: there is a gate and no residual; or eps is no number of at least 0.
        NormforgeError: whatever else `layernorm2d_fwd` raises.
    """
    operands = (x, scale, shift, gate, residual, weight, bias)
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    found = _normalise(operands, ("layer", eps, 0.0, "none", None, records(operands)))
    return found


@overload
def modulated_rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> torch.Tensor: ...


@overload
def modulated_rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def modulated_rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute RMSNorm over the last dimension, scaled and shifted per sample; see `modulated_layer_norm` for errors.

    Args:
        x: (B, ..., N), fp16, bf16, fp32 or fp64. An x that kernels cannot walk is copied once.
        scale: (B, N), one row per sample; x's shape, one row per row of x; or (N,), one row for all. fp16, bf16, fp32
            or fp64, rows on any stride.
        shift: (B, N), x's shape or (N,), as scale.
        gate: (B, N), x's shape or (N,), as scale, or None for 1; requires residual.
        residual: x's shape, or None for 0.
        weight: (N,), or None for 1.
        eps: added to the mean square.
        weight_offset: added to every weight, in fp32.
    """
    operands = (x, scale, shift, gate, residual, weight, None)
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    found = _normalise(operands, ("rms", eps, weight_offset, "none", None, records(operands)))
    return found


def _normalise(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    found = None if is_dynamo_compiling() else road.normalise_known(row.CALLS, operands, options)
    return _first(operands, options) if found is None else found


def _first(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """Run a call that no look-up knows."""
    if is_handed_on(operands):
        given = road.named(row.CALLS, operands, options)
        return handed_on(_PUBLIC[options[0]], operands, given, positional=3)
    row.check_gate(operands)
    return normalise_family(row.CALLS, operands, options)


# By the norm's word.
_PUBLIC: dict[str, Callable[..., Any]] = {"layer": modulated_layer_norm, "rms": modulated_rms_norm}

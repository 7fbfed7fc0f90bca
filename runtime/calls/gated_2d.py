"""Gated norms with all that their kernels return: quantised rows with their scales, and statistics."""

from __future__ import annotations

import torch

from ..codegen.values import FusedQuant, GateActivation
from ..mode_words import word
from . import gated, neighbours
from .outputs import LayerNormOutput
from .public import GatedOperands, GatedOptions


def gated_layernorm2d_fwd(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str | GateActivation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    fquant: str | int | FusedQuant = "none",
    out_dtype: torch.dtype | None = None,
    save_mv: bool = False,
) -> LayerNormOutput:
    """The forward pass of `gated_layer_norm`, its y quantised if asked; see `layernorm2d_fwd` for errors too.

    What is quantised is y in fp32, gate and all, each row by its own y_scale. Of groups, each group of a row is one.
    Not differentiable.

    Args:
        x: (..., N), fp16, bf16 or fp32, on a GPU (or anywhere under TRITON_INTERPRET=1); rows on up to three strides.
        gate: x's shape, fp16, bf16 or fp32, on strides of its own.
        weight: (N,), fp16, bf16 or fp32, or None for 1.
        bias: (N,), likewise, or None for 0.
        eps: added to the variance.
        activation: see `gated_rms_norm`.
        norm_before_gate: see `gated_rms_norm`.
        group_size: see `gated_rms_norm`.
        fquant: "none" (0) or "dynamic" (2).
        out_dtype: y's dtype. None is x's dtype, or torch.int8 with quantisation; torch.float8_e4m3fn,
            torch.float8_e4m3fnuz and torch.float8_e5m2 quantise too.
        save_mv: return mean and rstd.

    Returns:
        `LayerNormOutput`, with None for what was not asked. y_scale, mean and rstd have x's shape without the last
        dimension; of groups (..., N / group_size).
    """
    options = _options("layer", (activation, norm_before_gate), eps, fquant, out_dtype, save_mv)
    return _launched((x, gate, weight, bias), options, group_size)


def gated_rmsnorm2d_fwd(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str | GateActivation = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    fquant: str | int | FusedQuant = "none",
    out_dtype: torch.dtype | None = None,
    save_mv: bool = False,
) -> LayerNormOutput:
    """The forward pass of `gated_rms_norm`, its y quantised if asked; see `gated_layernorm2d_fwd`.

    Args:
        x: see `gated_layernorm2d_fwd`, as for every argument not described here.
        gate: see `gated_layernorm2d_fwd`.
        weight: see `gated_layernorm2d_fwd`.
        eps: added to the mean square.
        activation: see `gated_layernorm2d_fwd`.
        norm_before_gate: see `gated_layernorm2d_fwd`.
        group_size: see `gated_layernorm2d_fwd`.
        fquant: see `gated_layernorm2d_fwd`.
        out_dtype: see `gated_layernorm2d_fwd`.
        save_mv: return rstd; mean is always None.
    """
    options = _options("rms", (activation, norm_before_gate), eps, fquant, out_dtype, save_mv)
    return _launched((x, gate, weight, None), options, group_size)


def _options(
    norm: str,
    gating: tuple[str | GateActivation, bool],
    eps: float,
    fquant: str | int | FusedQuant,
    out_dtype: torch.dtype | None,
    save_mv: bool,
) -> GatedOptions:
    # Here a member may stand for a word, and the operator's schema has words alone.
    quantised = word(FusedQuant, "fquant", fquant).value
    return norm, *gated.words(*gating), eps, 0.0, quantised, out_dtype, save_mv


def _launched(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> LayerNormOutput:
    if group_size is not None:
        operands = gated.in_groups(operands, group_size)
    *said, fquant, out_dtype, saves = options
    if out_dtype is None and fquant == "none" and isinstance(operands[0], torch.Tensor):
        # Whatever autocast would have.
        out_dtype = operands[0].dtype
    found = neighbours.launched_2d(gated.CALLS, operands, (*said, fquant, out_dtype, saves))
    return found if group_size is None else found._replace(y=found.y.flatten(-2))

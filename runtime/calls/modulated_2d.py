"""Modulated norms with all that their kernels return: quantised rows with their scales, and statistics."""

from __future__ import annotations

import torch

from ..codegen.values import FusedQuant
from ..mode_words import word
from . import modulated, neighbours
from .outputs import LayerNormOutput
from .public import ModulatedOperands, ModulatedOptions


def modulated_layernorm2d_fwd(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    fquant: str | int | FusedQuant = "none",
    out_dtype: torch.dtype | None = None,
    save_mv: bool = False,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> LayerNormOutput:
    """The forward pass of `modulated_layer_norm`, its y quantised if asked; see `layernorm2d_fwd` for errors too.

    What is quantised is y in fp32, modulation and all, each row by its own y_scale. Not differentiable.

    Args:
        x: (..., N), fp16, bf16 or fp32, on a GPU (or anywhere under TRITON_INTERPRET=1); rows on up to three strides.
        scale: (B, N) of an x of (B, ..., N), one for each sample; x's shape, one for each row; or (N,), one for all.
            fp16, bf16 or fp32, rows on any stride.
        shift: likewise, of any of these shapes.
        gate: likewise, or None for 1; goes with residual.
        residual: x's shape, fp16, bf16 or fp32, or None for 0.
        weight: (N,), fp16, bf16 or fp32, or None for 1.
        bias: (N,), likewise, or None for 0.
        eps: added to the variance.
        fquant: "none" (0) or "dynamic" (2).
        out_dtype: y's dtype. None is x's dtype, or torch.int8 with quantisation; torch.float8_e4m3fn,
            torch.float8_e4m3fnuz and torch.float8_e5m2 quantise too.
        save_mv: return mean and rstd.
        out: where y goes, instead of a new tensor; contiguous, in y's dtype; may be x or residual itself if that is
            theirs.
        residual_out: where the sum goes, likewise, in residual's dtype; may be residual or x itself.

    Returns:
        `LayerNormOutput`, with None for what was not asked. residual_out is residual + x * gate, in residual's dtype.
    """
    operands = (x, scale, shift, gate, residual, weight, bias)
    return _launched(operands, ("layer", eps, 0.0, fquant, out_dtype, save_mv), (out, residual_out))


def modulated_rmsnorm2d_fwd(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    fquant: str | int | FusedQuant = "none",
    out_dtype: torch.dtype | None = None,
    save_mv: bool = False,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> LayerNormOutput:
    """The forward pass of `modulated_rms_norm`, its y quantised if asked; see `modulated_layernorm2d_fwd`.

    Args:
        x: see `modulated_layernorm2d_fwd`, as for every argument not described here.
        scale: see `modulated_layernorm2d_fwd`.
        shift: see `modulated_layernorm2d_fwd`.
        gate: see `modulated_layernorm2d_fwd`.
        residual: see `modulated_layernorm2d_fwd`.
        weight: see `modulated_layernorm2d_fwd`.
        eps: added to the mean square.
        weight_offset: added to every weight, in fp32.
        fquant: see `modulated_layernorm2d_fwd`.
        out_dtype: see `modulated_layernorm2d_fwd`.
        save_mv: return rstd; mean is always None.
        out: see `modulated_layernorm2d_fwd`.
        residual_out: see `modulated_layernorm2d_fwd`.
    """
    operands = (x, scale, shift, gate, residual, weight, None)
    return _launched(operands, ("rms", eps, weight_offset, fquant, out_dtype, save_mv), (out, residual_out))


def _launched(operands: ModulatedOperands, options: ModulatedOptions, places: neighbours.Places) -> LayerNormOutput:
    modulated.check_gate(operands)
    norm, eps, weight_offset, fquant, out_dtype, saves = options
    # Here a member may stand for a word, and the operator's schema has words alone.
    quantised = word(FusedQuant, "fquant", fquant).value
    if out_dtype is None and quantised == "none" and isinstance(operands[0], torch.Tensor):
        # Whatever autocast would have.
        out_dtype = operands[0].dtype
    said = (norm, eps, weight_offset, quantised, out_dtype, saves)
    return neighbours.launched_2d(modulated.CALLS, operands, said, places)

"""The oracle of modulated norms, in plain torch; see `modulated_layer_norm` for the formula's source."""

from __future__ import annotations

from typing import Any

import torch

from .reference import ReferenceOutput, layernorm2d_fwd, rmsnorm2d_fwd


def modulated_layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **others: Any,
) -> ReferenceOutput:
    """Compute in fp64 what the kernel of `normforge.modulated_layer_norm` should return (Peebles and Xie, 2022).

    Statistics are returned as by `layernorm2d_fwd`, which takes all other arguments.
    """
    s = _sum(x, gate, residual)
    return _modulated(layernorm2d_fwd(s, **others), scale, shift, s, residual, out_dtype or x.dtype)


def modulated_rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **others: Any,
) -> ReferenceOutput:
    """The same of `normforge.modulated_rms_norm` and `rmsnorm2d_fwd`."""
    s = _sum(x, gate, residual)
    return _modulated(rmsnorm2d_fwd(s, **others), scale, shift, s, residual, out_dtype or x.dtype)


def _sum(x: torch.Tensor, gate: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    s = x.double()
    if gate is not None:
        s = s * _of_each_row(gate, x)
    return s if residual is None else s + residual.double()


def _of_each_row(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A modulation with a row for each of x's."""
    wide = operand.double()
    if operand.dim() == 2 and x.dim() > 2:
        wide = torch.stack([row.expand(x.shape[1:]) for row in wide])
    return wide.expand(x.shape)


def _modulated(
    rows: ReferenceOutput,
    scale: torch.Tensor,
    shift: torch.Tensor,
    s: torch.Tensor,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> ReferenceOutput:
    z = rows.z * (1 + _of_each_row(scale, s)) + _of_each_row(shift, s)
    residual_out, sums = None, None
    if residual is not None:
        residual_out = s.to(residual.dtype)
        # Of fp32 operands a fused multiplication and addition rounds once, and the two by themselves twice.
        error = 2.0**-23 * (s.abs() + (s - residual.double()).abs())
        sums = (s - error).to(residual.dtype), (s + error).to(residual.dtype)
    return rows._replace(y=z.to(dtype), residual_out=residual_out, z=z, sums=sums)

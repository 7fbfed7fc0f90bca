"""Modulated norms by torch's operators, forward and backward: where no kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import torch_instead
from .straight import ModulatedOperands, ModulatedOptions
from .traced import unrecorded


class Told(NamedTuple):
    """What a backward pass has to know besides tensors.

    Attributes:
        norm: the norm's word.
        weight_offset: added to weight.
        dtypes: of the operands; None of those that are not there.
    """

    norm: str
    weight_offset: float
    dtypes: tuple[torch.dtype | None, ...]


class Kept(NamedTuple):
    """What a forward pass keeps for its backward pass.

    Attributes:
        rows: what was normalised: x, or the sum as it was stored.
        scale: as the call was given it, like those that follow.
        shift: likewise.
        gate: likewise.
        gated: x, where there is a gate.
        weight: likewise.
        bias: likewise.
        mean: a value a row; None for RMSNorm.
        rstd: likewise.
    """

    rows: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    gate: torch.Tensor | None
    gated: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


def normalise(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """What `modulated.normalise` returns of the same arguments."""
    x, scale, shift, gate, residual, weight, bias = operands
    norm, eps, weight_offset, _, out_dtype, _ = options
    total = torch_instead.widened(x)
    if gate is not None:
        total = total * _beside(gate, x)
    if residual is not None:
        total = torch_instead.as_stored(total + torch_instead.widened(residual), residual.dtype)
    asked = (norm, eps, weight_offset, total.dtype, "after_weight")
    with unrecorded():
        shape = tuple(x.shape[-1:])
    y = torch_instead.normalise((total, weight, bias, None, None), shape, asked)
    y = (y * (1 + _beside(scale, x)) + _beside(shift, x)).to(out_dtype or x.dtype)
    return y if residual is None else (y, total.to(residual.dtype))


def _beside(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A modulation in the type of arithmetic, of a shape that broadcasts to x's."""
    wide = torch_instead.widened(operand)
    if 1 < wide.dim() < x.dim():
        for _ in range(x.dim() - wide.dim()):
            wide = wide.unsqueeze(1)
    return wide


def gradients(
    kept: Kept,
    told: Told,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradients of a call's operands that are due, differentiable: each rounded once, sums in a fixed order.

    What `modulated_backward` computes by kernels where nobody can ask for a gradient of them.

    With h the normalised rows, a = h * weight + bias and g = dy * (1 + scale) * weight: ds is what the norm's backward
    pass makes of g, and the gradient that arrives for the sum; dx = ds * gate, dgate = ds * x, dscale = dy * a and
    dshift = dy, summed over the rows that share them.
    """
    rows = kept.rows
    if dy is None:
        ds = None if dresidual_out is None else dresidual_out.float()
        found = _of_sum(kept, ds, due)
        return _rounded(found, told, due)
    s, rstd = rows.float(), kept.rstd.view(*rows.shape[:-1], 1)
    mean = None if kept.mean is None else kept.mean.view(rstd.shape)
    if torch.is_grad_enabled() and s.requires_grad:
        mean, rstd = torch_instead.depending(s, mean, rstd)
    h = s * rstd if mean is None else (s - mean) * rstd
    factor = None if kept.weight is None else kept.weight.float() + told.weight_offset
    dy = dy.float()
    dz = dy * (1 + _beside(kept.scale, rows))
    g = dz if factor is None else dz * factor
    ds = torch_instead.through_rows(g, h, rstd, mean is not None, dresidual_out)
    found = _of_sum(kept, ds, due)
    _, for_scale, for_shift, _, _, for_weight, for_bias = due
    if for_scale:
        a = h if factor is None else h * factor
        found[1] = _summed(dy * (a if kept.bias is None else a + kept.bias.float()), kept.scale)
    if for_shift:
        found[2] = _summed(dy, kept.shift)
    if for_weight:
        found[5] = torch_instead.over_rows(dz * h)
    if for_bias:
        found[6] = torch_instead.over_rows(dz)
    return _rounded(found, told, due)


def _of_sum(kept: Kept, ds: torch.Tensor | None, due: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of x, gate and residual, given that of what is normalised; None in place of the others."""
    found: list[torch.Tensor | None] = [None] * len(due)
    if ds is None:
        return found
    found[0] = found[4] = ds
    if kept.gate is not None and kept.gated is not None:
        found[0] = ds * _beside(kept.gate, ds) if due[0] else None
        found[3] = _summed(ds * kept.gated.float(), kept.gate) if due[3] else None
    return found


def _summed(gradient: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """The sum of a gradient's rows that share an operand's, in fp32."""
    if operand.dim() == gradient.dim():
        return gradient
    if operand.dim() == 1:
        return torch_instead.over_rows(gradient)
    return gradient.sum(tuple(range(1, gradient.dim() - 1)), dtype=torch.float32)


def _rounded(found: Sequence[torch.Tensor | None], told: Told, due: Sequence[bool]) -> list[torch.Tensor | None]:
    return [
        gradient.to(dtype) if needed and gradient is not None else None
        for gradient, dtype, needed in zip(found, told.dtypes, due, strict=True)
    ]

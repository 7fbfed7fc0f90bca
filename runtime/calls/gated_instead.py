"""Gated norms by torch's operators, forward and backward: where no kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..codegen.values import GateActivation, Gating
from ..mode_words import word
from . import torch_instead
from .traced import unrecorded


class Told(NamedTuple):
    """What a backward pass has to know besides tensors.

    Attributes:
        norm: the norm's word.
        gating: where the gate is.
        activation: what becomes of it.
        weight_offset: added to weight.
        dtypes: of the operands; None of those that are not there.
    """

    norm: str
    gating: str | Gating
    activation: str | GateActivation
    weight_offset: float
    dtypes: tuple[torch.dtype | None, ...]


class Kept(NamedTuple):
    """What a forward pass keeps for its backward pass.

    Attributes:
        x: as the call was given it, like those that follow.
        gate: likewise.
        weight: likewise; of groups, x is (..., G, N).
        bias: likewise.
        mean: a value a row, of what was normalised; None for RMSNorm.
        rstd: likewise.
    """

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


def normalise(operands: Sequence[Any], options: Sequence[Any]) -> Any:
    """What `neighbours.normalise` returns of the same arguments."""
    x, gate, weight, bias = operands
    norm, gating, activation, eps, weight_offset, _, out_dtype, _ = options
    is_before = word(Gating, "gating", gating).is_before
    factor = _activated(activation, torch_instead.widened(gate))
    s = torch_instead.widened(x)
    s = s * factor if is_before else s
    with unrecorded():
        shape = tuple(x.shape[-1:])
    y = torch_instead.normalise((s, None, None, None, None), shape, (norm, eps, 0.0, None, "after_weight"))
    y = y if weight is None else y * (torch_instead.widened(weight) + weight_offset)
    y = y if bias is None else y + torch_instead.widened(bias)
    return (y if is_before else y * factor).to(out_dtype or x.dtype)


def gradients(kept: Kept, told: Told, dy: torch.Tensor, due: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of a call's operands that are due, differentiable: each rounded once, sums in a fixed order.

    What `gated_backward` computes by kernels where nobody can ask for a gradient of them.

    With f the activated gate, f' its slope and h the normalised rows: behind the norm, dgate = dy * (h * weight + bias)
    * f', and dy * f takes dy's place. In front of it, the norm's backward pass makes ds of dy, dx = ds * f and dgate =
    ds * x * f'.
    """
    is_before = word(Gating, "gating", told.gating).is_before
    x, gate, dy = kept.x.float(), kept.gate.float(), dy.float()
    factor = _activated(told.activation, gate)
    s = x * factor if is_before else x
    rstd = kept.rstd.view(*x.shape[:-1], 1)
    mean = None if kept.mean is None else kept.mean.view(rstd.shape)
    if torch.is_grad_enabled() and s.requires_grad:
        mean, rstd = torch_instead.depending(s, mean, rstd)
    h = s * rstd if mean is None else (s - mean) * rstd
    weight = None if kept.weight is None else kept.weight.float() + told.weight_offset
    of_affine = dy if is_before else dy * factor
    g = of_affine if weight is None else of_affine * weight
    ds = torch_instead.through_rows(g, h, rstd, mean is not None, None)
    if is_before:
        dgate = ds * x
    else:
        y = h if weight is None else h * weight
        dgate = dy * (y if kept.bias is None else y + kept.bias.float())
    found = (
        ds * factor if is_before else ds,
        dgate * _slope(told.activation, gate) if due[1] else None,
        None if kept.weight is None else _summed(of_affine * h, kept.weight),
        None if kept.bias is None else _summed(of_affine, kept.bias),
    )
    return [
        gradient.to(dtype) if needed and gradient is not None and dtype is not None else None
        for gradient, dtype, needed in zip(found, told.dtypes, due, strict=True)
    ]


def _activated(activation: str | GateActivation, gate: torch.Tensor) -> torch.Tensor:
    rising = torch.sigmoid(gate)
    return rising if word(GateActivation, "activation", activation) is GateActivation.SIGMOID else gate * rising


def _slope(activation: str | GateActivation, gate: torch.Tensor) -> torch.Tensor:
    rising = torch.sigmoid(gate)
    if word(GateActivation, "activation", activation) is GateActivation.SIGMOID:
        return rising * (1 - rising)
    return rising * (1 + gate * (1 - rising))


def _summed(gradient: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """The sum of a gradient's rows that share an operand's, in fp32."""
    leading = tuple(range(gradient.dim() - operand.dim()))
    return gradient.sum(leading, dtype=torch.float32) if leading else gradient

"""Gated norms of flash-linear-attention, Triton kernels: the gate behind the norm, whole rows."""

from __future__ import annotations

import torch

from ..cells import Norm
from ..gated_cells import GatedCell
from ..gates import Function, builders
from ..provider import Provider, load

_MODULE = "fla.modules.fused_norm_gate"


def _function(cell: GatedCell, eps: float) -> Function:
    function = getattr(load(_MODULE), "rms_norm_gated" if cell.norm is Norm.RMS else "layer_norm_gated")

    def run(
        x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        y: torch.Tensor = function(x, gate, weight, bias, eps=eps)
        return y

    return run


PROVIDERS = (
    Provider(
        "fla",
        "flash-linear-attention",
        (_MODULE,),
        builders(_function),
        distribution="flash-linear-attention",
        groups=("forward", "backward", "forward, projected", "backward, projected"),
    ),
)

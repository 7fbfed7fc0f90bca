"""Gated norms of mamba_ssm, Triton kernels: either order, groups of columns."""

from __future__ import annotations

import torch

from ..cells import Norm
from ..gated_cells import GatedCell
from ..gates import Function, builders
from ..provider import Provider, load

_MODULE = "mamba_ssm.ops.triton.layernorm_gated"


def _function(cell: GatedCell, eps: float) -> Function:
    function = getattr(load(_MODULE), "rmsnorm_fn" if cell.norm is Norm.RMS else "layernorm_fn")
    options = {"eps": eps, "group_size": cell.columns or None, "norm_before_gate": not cell.gate_first}

    def run(
        x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        y: torch.Tensor = function(x, weight, bias, z=gate, **options)
        return y

    return run


PROVIDERS = (Provider("mamba-ssm", "mamba_ssm", (_MODULE,), builders(_function), distribution="mamba-ssm"),)

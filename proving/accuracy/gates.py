"""Norms with a gate, measured: ours, torch's operators composed in fp32, and fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import normforge
from normforge.calls import road
from normforge.calls.functions import completed
from normforge.calls.outputs import dtypes_of
from normforge.codegen.model import Mode
from normforge.codegen.parameters import GATED
from normforge.codegen.values import GateActivation
from normforge.dtypes import TORCH_DTYPES
from normforge.families.gated import row as gated
from normforge.families.operands import GatedSaved
from normforge.reference import gated as gating_reference

from . import peer
from .peer import EPS
from .units import Exact, statistics


def activated(mode: Mode, gate: torch.Tensor) -> torch.Tensor:
    """Return the factors of rows, in the dtype of the argument."""
    sigmoid = mode.gate_activation is GateActivation.SIGMOID
    return torch.sigmoid(gate) if sigmoid else functional.silu(gate)


def forward(mode: Mode, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ours."""
    run: Any = normforge.gated_layernorm2d_fwd if mode.norm.centres else normforge.gated_rmsnorm2d_fwd
    found = run(
        x,
        gate,
        weight,
        eps=EPS,
        activation=mode.gate_activation,
        norm_before_gate=not mode.gating.is_before,
        fquant=mode.fquant,
        out_dtype=TORCH_DTYPES[mode.dtype_out],
        save_mv=mode.save_mv,
    )
    return {name: tensor for name, tensor in found._asdict().items() if tensor is not None}


def torchs(mode: Mode, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """torch's, given fp32; y is fp32."""
    factor = activated(mode, gate.float())
    before = mode.gating.is_before
    found = peer.forward(mode.norm.centres, x.float() * factor if before else x.float(), weight.float(), None)
    return found if before else found | {"y": found["y"] * factor}


def backward(
    mode: Mode,
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    saved: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Our gradients, from the statistics of what is normalised."""
    function = GATED.functions[mode.norm]
    words = {"gating": mode.gating, "activation": mode.gate_activation, "eps": EPS, "save_mv": True}
    given = completed(function, {"x": x, "gate": gate, "weight": weight, **words})
    operands, options = (
        road.operands_of(gated.CALLS, given),
        road.options_of(gated.CALLS, mode.norm.value, given),
    )
    told = gated.CALLS.args(options, dtypes_of(operands))
    kept = GatedSaved(x, gate, weight, None, saved.get("mean"), saved["rstd"])
    due = [operand is not None for operand in operands]
    found = gated.IN_PARTS.gradients(kept, told, (dy, None), due)
    return dict(zip(("dx", "dgate", "dweight"), (each for each in found if each is not None), strict=True))


def torchs_gradients(
    mode: Mode, dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
) -> dict[str, torch.Tensor]:
    """torch's, through its operators in fp32, rounded once."""
    leaves = tuple(tensor.detach().float().requires_grad_() for tensor in (x, gate, weight))
    rows, factor = leaves[0], activated(mode, leaves[1])
    before, shape = mode.gating.is_before, [x.shape[-1]]
    rows = rows * factor if before else rows
    if mode.norm.centres:
        y = functional.layer_norm(rows, shape, leaves[2], None, EPS)
    else:
        y = functional.rms_norm(rows, shape, leaves[2], EPS)
    found = torch.autograd.grad(y if before else y * factor, leaves, dy.float())
    return {name: each.to(x.dtype) for name, each in zip(("dx", "dgate", "dweight"), found, strict=True)}


def exact_gradients(
    mode: Mode, dy: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
) -> dict[str, Exact]:
    """fp64's, and what the terms of each add up to without their signs."""
    bias = torch.zeros_like(weight) if mode.norm.centres else None
    found = gating_reference.gradients(
        dy, x, gate, weight, bias, gating=mode.gating, activation=mode.gate_activation, eps=EPS
    )
    factor, sigmoid = activated(mode, gate.double()), torch.sigmoid(gate.double())
    slope = sigmoid * (1 - sigmoid)
    if mode.gate_activation is GateActivation.SILU:
        slope = sigmoid + gate.double().abs() * slope
    before = mode.gating.is_before
    s = x.double() * factor if before else x.double()
    mean, rstd = statistics(s, EPS, centres=mode.norm.centres)
    h, passed = ((s - mean) * rstd).abs(), dy.double().abs() * weight.double().abs()
    g = passed if before else passed * factor.abs()
    of_s = (g + h * (g * h).mean(-1, keepdim=True) + g.mean(-1, keepdim=True) * mode.norm.centres) * rstd
    magnitudes = {
        "dx": of_s * factor.abs() if before else of_s,
        "dgate": (of_s * x.double().abs() if before else passed * h) * slope,
        "dweight": (dy.double().abs() * h * (1.0 if before else factor.abs())).sum(0),
    }
    return {name: Exact(getattr(found, name), magnitude) for name, magnitude in magnitudes.items()}

"""The results in fp64 that ours and torch's are held to."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from normforge.codegen.model import Mode
from normforge.codegen.values import GateActivation
from normforge.reference import BACKWARD
from normforge.reference import gated as gating_reference
from normforge.reference.grouped import group_norm_bwd

from ..cases import Tensors
from . import peer
from .cases import GROUPS, AnyCase, Case, GroupCase, Layout
from .ours import dropout
from .peer import EPS
from .units import Exact, median, rounded, statistics


def normalised(case: AnyCase, rows: Tensors) -> torch.Tensor:
    """Return the rows that are normalised."""
    if "residual" in rows and not case.adds_behind:
        return peer.stored_sum(rows).double()
    s = rows["x"].double()
    if isinstance(case, Case) and case.mode.gating.is_before:
        return s * peer.activated(case.mode, rows["gate"].double())
    return s


def forward(case: AnyCase, rows: Tensors, half: torch.dtype | None) -> dict[str, Exact]:
    """Return the outputs; rows are rounded first to `half`."""
    s, weight = normalised(case, rows), rows["weight"].double()
    mean, rstd = statistics(s, EPS, centres=case.centres, averages=case.averages)
    h, either = (s - mean) * rstd, torch.zeros_like(s)
    if isinstance(case, GroupCase):
        z = (case.shaped(h) * weight.view(-1, 1)).reshape(h.shape)
        y = functional.silu(z) if case.mode.activation.is_applied else z
    else:
        h, either = (h, either) if half is None else rounded(h, half)
        y, either = h * weight, either * weight.abs()
        if "bias" in rows:
            y += rows["bias"].double()
        if case.adds_behind:
            y += rows["residual"].double()
        if case.mode.gating.gates and not case.mode.gating.is_before:
            y *= peer.activated(case.mode, rows["gate"].double())
        if "cos" in rows:
            of_terms = rows["cos"].abs(), rows["sin"].abs(), 1
            sizes, either = (peer.turned(each, *of_terms) for each in (y.abs(), either))
            y = peer.turned(y, rows["cos"], rows["sin"])
        if case.mode.fquant.quantises:
            low, y_scale, high = (
                each.amax(-1) / case.mode.dtype_out.qmax for each in (y.abs() - either, y.abs(), y.abs() + either)
            )
            return {"y_scale": Exact(y_scale, torch.zeros_like(y_scale), torch.maximum(high - y_scale, y_scale - low))}
    found = {}
    if isinstance(case, GroupCase) or not case.mode.statistics_only:
        typical = torch.maximum(median(y), sizes) if "cos" in rows else median(y)
        found["y"] = Exact(y, typical, None if half is None else either)
    if isinstance(case, GroupCase) or case.mode.save_mv:
        found["rstd"] = Exact(rstd[:, 0], torch.zeros_like(rstd[:, 0]))
        # No public function returns the means of channels, which y and the gradients depend on.
        has_mean = case.centres and not (isinstance(case, Case) and case.layout is Layout.CHANNELS)
        found |= {"mean": Exact(mean[:, 0], s.abs().mean(-1))} if has_mean else {}
    return found


def backward(case: AnyCase, rows: Tensors, saved: Tensors, half: torch.dtype | None) -> dict[str, Exact]:
    """Return the gradients, each beside what its terms add up to without their signs."""
    dy, x, weight = rows["dy"], rows["x"], rows["weight"]
    if isinstance(case, GroupCase):
        activation = "silu" if case.mode.activation.is_applied else None
        given = case.shaped(dy), case.shaped(x), GROUPS, weight, torch.zeros_like(weight), EPS
        found = group_norm_bwd(*given, activation=activation)
    elif case.mode.gating.gates:
        return _gated(case.mode, rows)
    else:
        more = dropout(x.device) if case.mode.dropout else {}
        if "cos" in rows:
            dy = peer.turned(dy.double(), rows["cos"], -rows["sin"])
        found = BACKWARD[case.mode.norm](dy, x, weight, **saved, **more)
    exact = {name: Exact(getattr(found, name), terms) for name, terms in found.magnitudes.items()}
    if half is not None:
        s = x.double() - saved["mean"].unsqueeze(-1) if case.centres else x.double()
        h, either = rounded(s * saved["rstd"].unsqueeze(-1), half)
        of_dweight = (dy.double() * h).sum(0), found.magnitudes["dweight"], (dy.double().abs() * either).sum(0)
        exact["dweight"] = Exact(*of_dweight)
    return exact


def _gated(mode: Mode, rows: Tensors) -> dict[str, Exact]:
    dy, x, gate, weight = (rows[name] for name in ("dy", "x", "gate", "weight"))
    bias, before = torch.zeros_like(weight) if mode.norm.centres else None, mode.gating.is_before
    words: dict[str, Any] = {"gating": mode.gating, "activation": mode.gate_activation, "eps": EPS}
    found = gating_reference.gradients(dy, x, gate, weight, bias, **words)
    factor, sigmoid = peer.activated(mode, gate.double()), torch.sigmoid(gate.double())
    slope = sigmoid * (1 - sigmoid)
    if mode.gate_activation is GateActivation.SILU:
        slope = sigmoid + gate.double().abs() * slope
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

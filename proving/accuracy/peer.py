"""torch's own operators on the same data: the yardstick.

They are the operators behind `torch.nn.functional.layer_norm`, `rms_norm` and `group_norm`, called by name because they
also return their statistics. They take operands of x's dtype, as all are here. Where ours returns fp32 of 16-bit rows,
adds a residual, gates, rotates or quantises, torch is given the operands in fp32, which loses nothing: its best way to
the same result. Saved statistics, which it returns in 16 bits on a CPU, are those of such a call too. Rows that are
rounded before the weight are those of its operator without a weight, in fp32, rounded, and multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from normforge.codegen.model import Mode
from normforge.codegen.values import GateActivation
from normforge.dtypes import TORCH_DTYPES

from ..cases import Tensors
from .cases import GROUPS, AnyCase, Case, GroupCase

EPS = 1e-5
_aten = torch.ops.aten


def activated(mode: Mode, gate: torch.Tensor) -> torch.Tensor:
    """Return the factors of rows, in the dtype of the argument."""
    return torch.sigmoid(gate) if mode.gate_activation is GateActivation.SIGMOID else functional.silu(gate)


def norm(centres: bool, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Tensors:
    """Return y in x's dtype, and mean (where rows are centred) and rstd in fp32, (M,)."""

    def run(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Tensors:
        shape = [x.shape[-1]]
        if centres:
            return dict(zip(("y", "mean", "rstd"), _aten.native_layer_norm(x, shape, weight, bias, EPS), strict=True))
        return dict(zip(("y", "rstd"), _aten._fused_rms_norm(x, shape, weight, EPS), strict=True))

    return _with_wide_statistics(run, x, weight, bias)


def l2_norm(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """Return y in x's dtype, and rstd, by elementary operators in fp32: torch has no such norm."""
    rstd = (x.float().square().sum(-1) + EPS).rsqrt()
    return {"y": (x.float() * rstd.unsqueeze(-1) * weight.float()).to(x.dtype), "rstd": rstd}


def _with_wide_statistics(run: Callable[..., Tensors], *given: torch.Tensor | None) -> Tensors:
    found = run(*given)
    if any(value.dtype != torch.float32 for name, value in found.items() if name != "y"):
        found = run(*(None if tensor is None else tensor.float() for tensor in given)) | {"y": found["y"]}
    return {name: value if name == "y" else value.flatten() for name, value in found.items()}


def forward(case: AnyCase, rows: Tensors, half: torch.dtype | None) -> Tensors:
    """Return the outputs; rows are rounded first to `half`."""
    if isinstance(case, GroupCase):
        return _group_norm(case, rows)
    mode, out = case.mode, TORCH_DTYPES[case.mode.dtype_out]
    x, weight, bias, factor = rows["x"], rows["weight"], rows.get("bias"), None
    if mode.gating.gates:
        factor = activated(mode, rows["gate"].float())
        x = x.float() * factor if mode.gating.is_before else x
    if "residual" in rows and not case.adds_behind:
        x = stored_sum(rows)
    if out != rows["x"].dtype or "residual" in rows or mode.gating.gates or "cos" in rows:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    if not case.averages:
        found = l2_norm(x, weight)
    elif half is None:
        found = norm(case.centres, x, weight, bias)
    else:
        found = norm(case.centres, x.float(), None, None)
        y = found["y"].to(half).float() * weight.float()
        found["y"] = y if bias is None else y + bias.float()
    if case.adds_behind:
        found["y"] = found["y"] + rows["residual"].float()
    if factor is not None and not mode.gating.is_before:
        found["y"] = found["y"] * factor
    if "cos" in rows:
        found["y"] = turned(found["y"], rows["cos"], rows["sin"])
    if mode.fquant.quantises:
        return {"y_scale": found["y"].abs().amax(-1) / mode.dtype_out.qmax}
    return found | {"y": found["y"].to(out)}


def turned(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int = -1) -> torch.Tensor:
    """Rotate pairs of columns i and i + N / 2 in the dtype of values; a sign of 1 adds what is subtracted."""
    cos, sin = (torch.cat((each, each), -1).to(values.dtype) for each in (cos, sin))
    a, b = values.chunk(2, -1)
    return values * cos + torch.cat((sign * b, a), -1) * sin


def stored_sum(rows: Tensors) -> torch.Tensor:
    """Return the sum as it is returned, which is defined in fp32 and is what both are given."""
    if "total" in rows:
        return rows["total"]
    return (rows["x"].float() + rows["residual"].float()).to(rows["residual"].dtype)


def _group_norm(case: GroupCase, rows: Tensors) -> Tensors:
    x, silu = case.shaped(rows["x"]).contiguous(), case.mode.activation.is_applied

    def run(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        found = _aten.native_group_norm(x, weight, None, *x.shape, GROUPS, EPS)
        return dict(zip(("y", "mean", "rstd"), found, strict=True))

    given = [each.float() if silu else each for each in (x, rows["weight"])]
    found = _with_wide_statistics(run, *given)
    y = functional.silu(found["y"]).to(x.dtype) if silu else found["y"]
    return found | {"y": y.reshape(-1, case.n)}


def backward(case: AnyCase, rows: Tensors, saved: Tensors, half: torch.dtype | None) -> Tensors:
    """Return the gradients, in x's dtype."""
    if isinstance(case, GroupCase):
        return _group_gradients(case, rows)
    if case.mode.gating.gates:
        return _gated_gradients(case, rows)
    if "cos" in rows:
        return _rotated_gradients(case, rows, half)
    if not case.averages:
        return _by_autograd(lambda x, weight: l2_norm(x, weight)["y"], rows["dy"], x=rows["x"], weight=rows["weight"])
    found = gradients(case.centres, rows["dy"], rows["x"], rows["weight"], saved)
    if half is not None:
        # torch has no operator for the gradient of a weight that rows were rounded before.
        h = rows["x"].float()
        if "mean" in saved:
            h = h - saved["mean"].unsqueeze(-1)
        h = (h * saved["rstd"].unsqueeze(-1)).to(half).float()
        found["dweight"] = (rows["dy"].float() * h).sum(0).to(rows["x"].dtype)
    return found


def gradients(centres: bool, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, statistics: Tensors) -> Tensors:
    """Return dx, dweight and dbias (where rows are centred), in x's dtype."""
    shape, dtype = [x.shape[-1]], x.dtype
    rstd = statistics["rstd"].unsqueeze(-1)
    if centres:
        # The CPU's operator takes fp32 statistics with fp32 weights alone.
        weight = weight if x.is_cuda else weight.float()
        mean, zeros = statistics["mean"].unsqueeze(-1), torch.zeros_like(weight)
        found: Any = _aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, zeros, [True] * 3)
    elif x.is_cuda:
        found = _aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, [True] * 2)
    else:
        # A CPU has no such operator.
        return _by_autograd(lambda x, weight: functional.rms_norm(x, shape, weight, EPS), dy, x=x, weight=weight)
    return {name: each.to(dtype) for name, each in zip(("dx", "dweight", "dbias"), found, strict=False)}


def _by_autograd(run: Callable[..., torch.Tensor], dy: torch.Tensor, **given: torch.Tensor) -> Tensors:
    """Return gradients through the forward operators in fp32, rounded once."""
    leaves = {name: tensor.detach().contiguous().float().requires_grad_() for name, tensor in given.items()}
    found = torch.autograd.grad(run(**leaves), [*leaves.values()], dy.float())
    return {f"d{name}": each.to(dy.dtype) for name, each in zip(leaves, found, strict=True)}


def _normalised(case: Case, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    run: Any = functional.layer_norm if case.centres else functional.rms_norm
    y: torch.Tensor = run(x, [case.n], weight, eps=EPS)
    return y


def _gated_gradients(case: Case, rows: Tensors) -> Tensors:
    def run(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        factor = activated(case.mode, gate)
        if case.mode.gating.is_before:
            return _normalised(case, x * factor, weight)
        return _normalised(case, x, weight) * factor

    return _by_autograd(run, rows["dy"], **{name: rows[name] for name in ("x", "gate", "weight")})


def _rotated_gradients(case: Case, rows: Tensors, half: torch.dtype | None) -> Tensors:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = _normalised(case, x)
        # The gradient of the rounding is 1.
        h = h if half is None else h + (h.to(half).float() - h).detach()
        return turned(h * weight, rows["cos"], rows["sin"])

    return _by_autograd(run, rows["dy"], x=rows["x"], weight=rows["weight"])


def _group_gradients(case: GroupCase, rows: Tensors) -> Tensors:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        z = functional.group_norm(x, GROUPS, weight, bias, EPS)
        return functional.silu(z) if case.mode.activation.is_applied else z

    x, weight = case.shaped(rows["x"]), rows["weight"]
    return _by_autograd(run, case.shaped(rows["dy"]), x=x, weight=weight, bias=torch.zeros_like(weight))

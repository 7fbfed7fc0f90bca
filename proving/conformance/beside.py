"""A forward and backward pass of norms with a gate, with dropout, and of GroupNorm, and the errors of all of it.

What is exact is torch's operators in fp64, with their gradients by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import normforge

from .case import Case, Norm
from .judge import OWN, CloseTally
from .outcome import Book
from .rows import Tensors

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}
_OPERANDS = ("x", "gate", "residual", "weight", "bias")


def judge(case: Case, given: Tensors, book: Book) -> None:
    """Make the call, and hold y and every gradient against fp64's."""
    names = [name for name in _OPERANDS if name in given]
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    y, keep = _call(case, leaves)
    gradients = torch.autograd.grad(y, list(leaves.values()), given["dy"])
    got = {"y": y.detach(), **{f"d{name}": each for name, each in zip(names, gradients, strict=True)}}
    exactly = {name: given[name].detach().double().requires_grad_() for name in names}
    want = _exact(case, exactly, keep)
    wanted = torch.autograd.grad(want, list(exactly.values()), given["dy"].double())
    expected = {"y": want.detach(), **{f"d{name}": each for name, each in zip(names, wanted, strict=True)}}
    device, tolerance = given["x"].device, case.tolerance
    for name, exact in expected.items():
        like = case.y if name == "y" else given[name[1:]].dtype
        if book.expects(name, got[name], (tuple(exact.shape), like)):
            by_row = tolerance.y if name == "y" else tolerance.dx
            suite = CloseTally(tolerance.parameters if name in ("dweight", "dbias") else by_row, device)
            own = CloseTally(OWN[like], device) if name == "y" else None
            for tally in (suite, own):
                if tally is not None:
                    tally.add(got[name].reshape(-1, exact.shape[-1]), exact.reshape(-1, exact.shape[-1]))
            book.open(name, suite, own)


def _call(case: Case, given: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Y, and what a dropout keeps."""
    affine = {name: given[name] for name in ("weight", "bias") if name in given}
    if case.groups:
        x = _channels(case, given["x"])
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if case.channels_last else x
        activation = None if case.activation == "none" else case.activation
        y = normforge.group_norm(x, case.groups, **affine, eps=case.eps, activation=activation)
        return y.reshape(case.shape), None
    is_layer = case.norm is Norm.LAYER
    if case.gate is not None:
        gated: Any = normforge.gated_layer_norm if is_layer else normforge.gated_rms_norm
        said: dict[str, Any] = {"activation": case.activation, "norm_before_gate": not case.gate_first}
        return gated(given["x"], given["gate"], **affine, **said, eps=case.eps), None
    add: Any = normforge.add_layer_norm if is_layer else normforge.add_rms_norm
    rng = torch.tensor([case.n, case.rows], device=given["x"].device)
    more: dict[str, Any] = {"dropout_p": case.dropout_p, "dropout_rng": rng, "return_mask": True}
    y, _, keep = add(given["x"], given["residual"], **affine, eps=case.eps, **more)
    return y, keep


def _exact(case: Case, given: Tensors, keep: torch.Tensor | None) -> torch.Tensor:
    x, weight, bias = given["x"], given.get("weight"), given.get("bias")
    act = _ACTIVATIONS.get(case.activation)
    if case.groups:
        y = functional.group_norm(_channels(case, x), case.groups, weight, bias, case.eps)
        return (y if act is None else act(y)).reshape(case.shape)
    if keep is not None:
        x = _sum(case, x, given["residual"], keep)
    factor = act(given["gate"]) if act is not None and case.gate is not None else None
    x = x if factor is None or not case.gate_first else x * factor
    if case.norm is Norm.LAYER:
        y = functional.layer_norm(x, (case.n,), weight, bias, case.eps)
    else:
        y = functional.rms_norm(x, (case.n,), weight, case.eps)
    return y if factor is None or case.gate_first else y * factor


def _sum(case: Case, x: torch.Tensor, residual: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the sum as it is returned, which is defined in fp32; autograd sees no rounding.

    The factor is rounded to fp32, and so is the product by itself.
    """
    factor = 1 / (1 - torch.tensor(case.dropout_p))
    total = torch.where(keep, x * factor.double(), 0.0) + residual
    stored = (torch.where(keep, x.float() * factor, 0.0) + residual.float()).to(case.residual)
    return total + (stored.double() - total).detach()


def _channels(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Return (samples, groups, n) rows as (samples, channels, positions)."""
    return rows.reshape(case.shape[0], case.channels, -1)

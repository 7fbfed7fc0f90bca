"""Make the call of a case by normforge's public functions, and return what came back, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import normforge

from .. import cases
from .case import RESIDUAL_OUT, Case, Norm, Y

Tensors = dict[str, torch.Tensor]

# The operands that gradients are due to.
LEAVES = ("x", "gate", "residual", "weight", "bias")


def results(case: Case, given: Tensors) -> Tensors:
    """Return the outputs of a case, and its gradients if some arrive; of a dropout also the kept elements, `keep`."""
    if not case.arriving:
        found = forward(case, given)
    elif case.y is not case.x or case.dy not in (None, case.y):
        # Autograd casts dy to y's dtype, and its functions return x's.
        return _direct(case, given)
    else:
        return _differentiated(case, given)
    return {name: tensor for name, tensor in found._asdict().items() if tensor is not None}


def arguments(case: Case, given: Tensors) -> dict[str, Any]:
    """Return the arguments of a forward function."""
    names = ("x", "weight", "bias", "residual", "x_bias", "smooth_scale")
    found: dict[str, Any] = {name: given[name] for name in names if name in given}
    found |= {"eps": case.eps, "cast": case.cast, "fadd": case.fadd, "fquant": case.fquant, "save_mv": case.save_mv}
    if case.weight_offset:
        found["weight_offset"] = case.weight_offset
    if case.quantises:
        found |= {"scale_dtype": case.scale, "rounding": case.rounding}
    if case.out is not None:
        found["out_dtype"] = case.out
    return found


def forward(case: Case, given: Tensors, home: Any = normforge, **others: Any) -> Any:
    """Call the forward function of normforge, or of another module."""
    return getattr(home, f"{case.norm.word}norm2d_fwd")(**arguments(case, given) | others)


def _direct(case: Case, given: Tensors) -> Tensors:
    saved = forward(case, given, save_mv=True)
    wants = tuple(f"d{name}" for name in LEAVES if name in given)
    more = {"mean": saved.mean} if case.norm is Norm.LAYER else {"weight_offset": case.weight_offset}
    backward = getattr(normforge, f"{case.norm.word}norm2d_bwd")
    found = backward(given["dy"], given["x"], given.get("weight"), rstd=saved.rstd, cast=case.cast, wants=wants, **more)
    return {"y": saved.y, **{name: getattr(found, name) for name in wants}}


def _differentiated(case: Case, given: Tensors) -> Tensors:
    leaves = {name: given[name].detach().requires_grad_() for name in LEAVES if name in given}
    outputs = _recorded(case, leaves)
    arriving = {Y: "dy", RESIDUAL_OUT: "dresidual_out"}
    gradients = torch.autograd.grad(
        [outputs[name] for name in case.arriving],
        list(leaves.values()),
        [given[arriving[name]].reshape(outputs[name].shape) for name in case.arriving],
        allow_unused=Y not in case.arriving,
    )
    found = {name: output.detach() for name, output in outputs.items()}
    named = zip(leaves, gradients, strict=True)
    return found | {f"d{name}": gradient for name, gradient in named if gradient is not None}


def _recorded(case: Case, leaves: Tensors) -> Tensors:
    """Make a call that autograd records."""
    if case.gate is not None or case.groups:
        (y,) = family(case).run(leaves | {"x": laid_out(case, leaves["x"])})
        return {"y": y.reshape(case.shape)}
    parameters = {name: leaves[name] for name in ("weight", "bias") if name in leaves}
    more: dict[str, Any] = {"cast": case.cast, "weight_offset": case.weight_offset, "eps": case.eps}
    if case.residual is None:
        return {"y": getattr(normforge, f"{case.norm.word}_norm")(leaves["x"], (case.n,), **parameters, **more)}
    if case.dropout_p:
        rng = torch.tensor([case.n, case.rows], device=leaves["x"].device)
        more |= {"dropout_p": case.dropout_p, "dropout_rng": rng, "return_mask": True}
    adding = getattr(normforge, f"add_{case.norm.word}_norm")
    found: Sequence[torch.Tensor] = adding(leaves["x"], leaves["residual"], **parameters, **more)
    return dict(zip(("y", RESIDUAL_OUT, "keep"), found, strict=False))


def family(case: Case) -> cases.Case:
    """Return a gated norm or GroupNorm, or the norm behind a dropout, as a case of the table of families."""
    at = (("norm", case.norm.word), ("without", ()))
    if case.groups:
        return cases.Case("group", (*at, ("num_groups", case.groups), ("activation", case.activation)))
    if case.gate is None:
        return cases.Case("plain", at)
    return cases.Case("gated", (*at, ("activation", case.activation), ("norm_before_gate", not case.gate_first)))


def laid_out(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Return x as the function takes it: of GroupNorm (samples, channels, positions)."""
    if not case.groups:
        return x
    x = x.reshape(case.shape[0], case.channels, -1)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if case.channels_last else x

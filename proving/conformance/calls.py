"""Make the call of a case by normforge's public functions, and return what came back, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import normforge

from .. import cases
from ..cases import Tensors
from .case import RESIDUAL_OUT, Case, Y

# The operands that gradients are due to.
LEAVES = ("x", "gate", "residual", "weight", "bias", "next_weight", "next_bias")


def results(case: Case, given: Tensors) -> Tensors:
    """Return the outputs of a case, and its gradients if some arrive; of a dropout also the kept elements, `keep`."""
    if not case.arriving:
        found = forward(case, given)
        return {name: tensor for name, tensor in found._asdict().items() if tensor is not None}
    if case.y is not case.x or case.dy not in (None, case.y):
        # Autograd casts dy to y's dtype, and its functions return x's.
        return _direct(case, given)
    leaves = {name: given[name].detach().requires_grad_() for name in LEAVES if name in given}
    return recorded(case, given, leaves, cases.Case.run)


def recorded(case: Case, given: Tensors, leaves: Tensors, run: Callable[..., tuple[torch.Tensor, ...]]) -> Tensors:
    """Return the outputs that `run` computes from a case of the table of families, and the gradients of leaves."""
    outputs = run(family(case), leaves | {"x": laid_out(case, leaves["x"])})
    named = dict(zip((Y, RESIDUAL_OUT, "keep"), outputs, strict=False))
    found = {name: as_rows(case, output.detach()) for name, output in named.items()}
    arriving = [
        laid_out(case, given[f"d{name}"].to(y.dtype)).reshape(y.shape) if name in case.arriving else None
        for name, y in named.items()
    ]
    return found | {f"d{name}": each for name, each in cases.gradients(outputs, leaves, arriving).items()}


def arguments(case: Case, given: Tensors) -> dict[str, Any]:
    """Return the arguments of a forward function."""
    names = ("x", "weight", "bias", "residual", "x_bias", "smooth_scale")
    found: dict[str, Any] = {name: given[name] for name in names if name in given}
    found |= {name: getattr(case, name) for name in ("eps", "cast", "fadd", "fquant", "rounding", "save_mv")}
    found |= {"out_dtype": case.out, "scale_dtype": case.scale}
    return found | ({"weight_offset": case.weight_offset} if case.weight_offset else {})


def forward(case: Case, given: Tensors, home: Any = normforge, **others: Any) -> Any:
    """Call the forward function of normforge, or of another module."""
    return getattr(home, f"{case.norm.row.stem}2d_fwd")(**arguments(case, given) | others)


def backward(case: Case, given: Tensors, mean: Any, home: Any = normforge, **others: Any) -> Any:
    """Call the backward function of normforge, or of another module."""
    others |= {"mean": mean} if case.norm.centres else {"weight_offset": case.weight_offset}
    run = getattr(home, f"{case.norm.row.stem}2d_bwd")
    return run(given["dy"], given["x"], given.get("weight"), cast=case.cast, **others)


def _direct(case: Case, given: Tensors) -> Tensors:
    saved = forward(case, given, save_mv=True)
    wants = tuple(f"d{name}" for name in LEAVES if name in given)
    found = backward(case, given, saved.mean, rstd=saved.rstd, wants=wants)
    return {"y": saved.y, **{name: getattr(found, name) for name in wants}}


def family(case: Case) -> cases.Case:
    """Return the call that autograd records as a case of the table of families."""
    at = {"norm": case.norm.value, "shape": case.shape, "eps": case.eps, "without": ()}
    without = tuple(operand for operand in ("residual", "weight") if getattr(case, operand) is None)
    options = {"cast": case.cast, "weight_offset": case.weight_offset, "without": without}
    dropout = {"dropout_p": case.dropout_p, "return_mask": True} if case.dropout_p else {}
    by_family: dict[str, dict[str, Any]] = {
        "group": {"num_groups": case.groups, "activation": case.activation},
        "gated": {"activation": case.activation, "norm_before_gate": not case.gate_first},
        "channels": {
            "dim": 1,
            "activation": None if case.activation == "none" else case.activation,
            "shape": (case.shape[0], case.n, *case.shape[1:-1]),
            "without": without,
        },
        "l2": {"without": without},
        "added": options,
        "renormed": options | {"next_norm": True},
        "plain": options | dropout,
    }
    return cases.Case(case.family, tuple({**at, **by_family[case.family]}.items()))


def laid_out(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Return x as the function takes it: with channels (samples, channels, positions)."""
    if case.over_channels:
        return x.movedim(-1, 1) if case.channels_last else x.movedim(-1, 1).contiguous()
    if not case.groups:
        return x
    x = x.reshape(case.shape[0], case.channels, -1)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if case.channels_last else x


def as_rows(case: Case, output: torch.Tensor) -> torch.Tensor:
    """Return an output of what `laid_out` returns in the case's shape."""
    return (output.movedim(1, -1) if case.over_channels else output).reshape(case.shape)

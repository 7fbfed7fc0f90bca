"""What calls of gated norms have of their own; see `neighbours` for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..codegen.parameters import GATED
from ..codegen.values import GateActivation, Gating
from ..errors import ShapeError
from . import eager, gated_backward
from .argument_checks import check_flag, check_tensor
from .known_backward import Learnt
from .neighbours import Operands, Options, launch_recorded, neighbour_of
from .outputs import unpacked_of
from .public import GatedOperands
from .record import Gradients, Recording
from .traced import unrecorded


def _saved(operands: Operands, total: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return operands


def _args(options: Options, dtypes: tuple[torch.dtype | None, ...], __: torch.dtype | None = None) -> eager.GatedArgs:
    norm, gating, activation, _, weight_offset, *_ = options
    return eager.GatedArgs(norm, gating, activation, weight_offset, dtypes)


def _gradients(
    saved: Sequence[Any],
    args: eager.GatedArgs,
    dy: torch.Tensor,
    _: None,
    due: tuple[bool, ...],
    by_formula: bool,
    learnt: Learnt | None,
) -> Gradients:
    *operands, statistics = saved
    unpacked = eager.GatedSaved(*[*operands, *unpacked_of(operands[0], statistics)])
    if by_formula or not gated_backward.takes(unpacked, dy):
        return eager.gated_gradients(unpacked, args, dy, due)
    return gated_backward.gradients(unpacked, args, dy, due, learnt)


CALLS = neighbour_of(
    GATED,
    eager=eager.gated,
    saved=_saved,
    args=_args,
    recording=Recording(launch_recorded, _gradients, "gated"),
)

# By norm_before_gate.
GATING = {True: Gating.AFTER_NORM.value, False: Gating.BEFORE_NORM.value}


def words(activation: Any, norm_before_gate: Any) -> tuple[str, str]:
    """Those of the rows for what callers say: gating, and the activation, which is checked later."""
    if norm_before_gate.__class__ is not bool:
        norm_before_gate = checked_flag(norm_before_gate)
    # An enum's member is no word of a schema.
    return GATING[norm_before_gate], activation.value if isinstance(activation, GateActivation) else activation


def checked_flag(norm_before_gate: object) -> bool:
    """What a caller said, True or False.

    Raises:
        ConflictError: it is neither.
    """
    return check_flag("norm_before_gate", norm_before_gate)


def divides(group_size: object, n: int) -> bool:
    """Whether groups of so many columns make up n."""
    return (
        isinstance(group_size, int) and not isinstance(group_size, bool) and 0 < group_size <= n and n % group_size == 0
    )


def in_groups(operands: GatedOperands, group_size: object) -> GatedOperands:
    """The tensors of a call as (..., G, group_size), and (G, group_size).

    Raises:
        ShapeError: they are not G * group_size long.
    """
    x, *others = operands
    check_tensor("x", x)
    with unrecorded():
        n = x.shape[-1] if x.dim() else 0
        if not isinstance(group_size, int) or not divides(group_size, n):
            raise ShapeError(
                f"group_size={group_size!r} and x has shape {tuple(x.shape)}; it takes a divisor of N, {n}"
            )
        for name, tensor, shape in zip(CALLS.inputs[1:], others, (x.shape, x.shape[-1:], x.shape[-1:]), strict=True):
            has = tuple(check_tensor(name, tensor).shape) if tensor is not None or name == "gate" else tuple(shape)
            if has != tuple(shape):
                raise ShapeError(f"{name} has shape {has}; it takes {tuple(shape)}")
    found: Any = [
        None if each is None else each.view(*each.shape[:-1], n // group_size, group_size) for each in operands
    ]
    grouped: GatedOperands = tuple(found)
    return grouped

"""What calls of modulated norms have of their own; see `neighbours` for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..codegen.parameters import MODULATED
from ..errors import ConflictError
from . import eager, modulated_backward
from .known_backward import Learnt
from .neighbours import Options, launch_recorded, neighbour_of
from .outputs import unpacked_of
from .public import ModulatedOperands
from .record import Gradients, Recording


def _saved(operands: ModulatedOperands, total: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return what was normalised (x, or residual_out, which the caller holds anyway), small operands, and a gated x."""
    x, scale, shift, gate, _, weight, bias = operands
    return x if total is None else total, scale, shift, gate, None if gate is None else x, weight, bias


def _args(
    options: Options, dtypes: tuple[torch.dtype | None, ...], _: torch.dtype | None = None
) -> eager.ModulatedArgs:
    return eager.ModulatedArgs(options[0], options[2], dtypes)


def _gradients(
    saved: Sequence[Any],
    args: eager.ModulatedArgs,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: tuple[bool, ...],
    by_formula: bool,
    learnt: Learnt | None,
) -> Gradients:
    *tensors, statistics = saved
    unpacked = eager.ModulatedSaved(*[*tensors, *unpacked_of(tensors[0], statistics)])
    if dy is None or by_formula or not modulated_backward.takes(unpacked, dy, dresidual_out):
        return eager.modulated_gradients(unpacked, args, dy, dresidual_out, due)
    return modulated_backward.gradients(unpacked, args, dy, dresidual_out, due, learnt)


CALLS = neighbour_of(
    MODULATED,
    eager=eager.modulated,
    saved=_saved,
    args=_args,
    # x, gate and residual make the sum.
    recording=Recording(launch_recorded, _gradients, "modulated", sums=(0, 3, 4)),
)


def check_gate(operands: ModulatedOperands) -> None:
    """Refuse a gate of rows that nothing is added to.

    Raises:
        ConflictError: there is a gate and no residual.
    """
    _, _, _, gate, residual, _, _ = operands
    if gate is not None and residual is None:
        raise ConflictError("gate scales x before residual is added to it, and none was passed; pass residual")

"""What calls of modulated norms have of their own; see `neighbours` for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..codegen.parameters import MODULATED
from ..errors import ConflictError
from . import eager, modulated_backward
from .known_backward import gradients_known
from .neighbours import Options, neighbour_of
from .outputs import Statistics, unpacked_of
from .straight import ModulatedOperands
from .traced import dispatch_modes, is_dynamo_compiling


def _kept(operands: ModulatedOperands, total: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What was normalised (x, or residual_out, which the caller holds anyway), what is small, and x where gated."""
    x, scale, shift, gate, _, weight, bias = operands
    return x if total is None else total, scale, shift, gate, None if gate is None else x, weight, bias


def _told(options: Options, dtypes: tuple[torch.dtype | None, ...]) -> eager.ModulatedArgs:
    return eager.ModulatedArgs(options[0], options[2], dtypes)


def _gradients(
    kept: Sequence[Any],
    statistics: Statistics,
    told: eager.ModulatedArgs,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """By kernels, unless a gradient of them could be asked for."""
    seen = torch.is_grad_enabled() or is_dynamo_compiling() or dispatch_modes() > 0
    learnt = None
    # What is known does not look for a tangent of forward-mode AD.
    unseen = not seen and forward_ad._current_level < 0
    if dy is not None and unseen and isinstance(statistics, torch.Tensor):
        arrived = (dy, dresidual_out, *kept, statistics)
        key, found = gradients_known("modulated", arrived, told, due)
        if found is not None:
            return found
        learnt = key, arrived
    known = eager.ModulatedSaved(*[*kept, *unpacked_of(kept[0], statistics)])
    if dy is None or seen or not modulated_backward.takes(known, dy, dresidual_out):
        return eager.modulated_gradients(known, told, dy, dresidual_out, due)
    return modulated_backward.gradients(known, told, dy, dresidual_out, due, learnt)


# x, gate and residual make the sum.
CALLS = neighbour_of(MODULATED, sums=(0, 3, 4), kept=_kept, told=_told, gradients=_gradients)


def check_gate(operands: ModulatedOperands) -> None:
    """Refuse a gate of rows that nothing is added to.

    Raises:
        ConflictError: there is a gate and no residual.
    """
    _, _, _, gate, residual, _, _ = operands
    if gate is not None and residual is None:
        raise ConflictError("gate scales x before residual is added to it, and none was passed; pass residual")

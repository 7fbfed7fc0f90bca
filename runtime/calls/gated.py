"""What calls of gated norms have of their own; see `neighbours` for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..codegen.parameters import GATED
from . import gated_backward, gated_instead
from .neighbours import Operands, Options, neighbour_of
from .straight import find_gated
from .traced import dispatch_modes, is_dynamo_compiling


def _kept(operands: Operands, total: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return operands


def _told(options: Options, dtypes: tuple[torch.dtype | None, ...]) -> gated_instead.Told:
    norm, gating, activation, _, weight_offset, *_ = options
    return gated_instead.Told(norm, gating, activation, weight_offset, dtypes)


def _gradients(
    kept: Sequence[Any],
    told: gated_instead.Told,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: Sequence[bool],
) -> list[torch.Tensor | None]:
    """By kernels, unless a gradient of them could be asked for."""
    if dy is None:
        return [None] * len(due)
    known = gated_instead.Kept(*kept)
    seen = torch.is_grad_enabled() or is_dynamo_compiling() or dispatch_modes() > 0
    if seen or not gated_backward.takes(known, dy):
        return gated_instead.gradients(known, told, dy, due)
    return gated_backward.gradients(known, told, dy, due)


CALLS = neighbour_of(GATED, sums=(), find=find_gated, kept=_kept, told=_told, gradients=_gradients)

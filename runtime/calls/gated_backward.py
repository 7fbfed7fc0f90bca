"""The backward pass of gated norms by kernels: the gradients of rows and gates, and sums for weight and bias."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..codegen.model import Mode
from ..codegen.parameters import GATED_BWD
from ..codegen.values import Direction, GateActivation, Gating, Norm
from ..dtypes import DTYPES
from ..mode_words import word
from ..selection import dispatch
from ..upstream.torch_dynamo import eager_only
from .eager import GatedArgs as Told
from .eager import GatedSaved as Kept
from .known_backward import Gradients, Learnt, looked_up_again
from .row_gradients import Backward, in_memory, launched, learn, rounded, shared_sum, sum_dtype
from .row_layout import walkable

# What `Kept` holds, but for statistics.
BACKWARD = Backward.of(GATED_BWD, ("x", "gate", "weight", "bias"))

# The second dimension of a grid takes 65535, and each group has a program or more.
_MOST_GROUPS = 2**15


def mode_of(told: Told, dtype: torch.dtype, grouped: bool) -> Mode:
    """The mode of the kernels for rows of a type, with a weight for all columns or one for each group of them."""
    own = DTYPES[dtype]
    return Mode(
        Norm(told.norm),
        own,
        own,
        direction=Direction.BACKWARD,
        gating=word(Gating, "gating", told.gating),
        gate_activation=word(GateActivation, "activation", told.activation),
        grouped=grouped,
    )


def takes(kept: Kept, dy: torch.Tensor) -> bool:
    """Whether kernels compute the gradients of a call: of tensors in memory."""
    return in_memory((*kept, dy)) and kept.x.numel() > 0 and _groups(kept) <= _MOST_GROUPS


def _groups(kept: Kept) -> int:
    """How many groups of columns have a weight or bias of their own; 0 if it is one for all."""
    return max(
        [0, *[vector.shape[0] for vector in (kept.weight, kept.bias) if vector is not None and vector.dim() > 1]]
    )


@eager_only
def gradients(kept: Kept, told: Told, dy: torch.Tensor, due: Sequence[bool], learnt: Learnt | None = None) -> Gradients:
    """What `eager.gated_gradients` returns of the same arguments, where `takes` has passed them.

    Args:
        kept: what the forward pass kept.
        told: see `eager.gated_gradients`.
        dy: the gradient of y.
        due: which gradients are.
        learnt: see `modulated_backward.gradients`.
    """
    plans = dispatch.plans
    for_x, for_gate, for_weight, for_bias = due
    x, groups = kept.x, _groups(kept)
    dy = _laid_out(dy, groups)
    learnt, known = looked_up_again("gated", learnt, told, due, dy, None)
    if known is not None:
        return known
    mode = mode_of(told, x.dtype, groups > 0)
    rows = {"dy": dy, "x": x, "gate": kept.gate}
    inputs: dict[str, torch.Tensor | None] = {
        **{name: _in_one_row(tensor, groups) for name, tensor in rows.items()},
        "weight": _of_groups(kept.weight, groups),
        "bias": _of_groups(kept.bias, groups) if mode.gating.is_after else None,
        "mean": kept.mean,
        "rstd": kept.rstd,
    }
    parts = groups or 1
    of_rows = zip(("dx", "dgate"), (for_x, for_gate), told.dtypes, strict=False)
    dtypes = {name: dtype for name, needed, dtype in of_rows if needed and dtype is not None}
    vectors = {"dweight": kept.weight, "dbias": kept.bias}
    for (name, vector), needed in zip(vectors.items(), (for_weight, for_bias), strict=True):
        if needed and vector is not None:
            # A vector for all of several groups is added up once more.
            dtypes[name] = sum_dtype(vector, parts)
    done = launched(BACKWARD, mode, parts, inputs, dtypes, vectors, x.shape, told.weight_offset, learnt)
    results = done.named()
    found = [
        results.get("dx"),
        results.get("dgate"),
        _shared(results.get("dweight"), kept.weight),
        _shared(results.get("dbias"), kept.bias),
    ]
    made = rounded(found, told.dtypes, due)
    learn(plans, learnt, done, made)
    return made


def _in_one_row(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the rows of all groups of a token as one row: the rows of one group are that far apart."""
    return walkable(rows.flatten(-2) if groups else rows)


def _laid_out(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Return rows that kernels can walk, in their own shape: the very tensor, or a copy."""
    found = _in_one_row(rows, groups)
    return rows if found.data_ptr() == rows.data_ptr() else found.view(rows.shape)


def _of_groups(vector: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """A row for each group, one behind the other, where there are groups."""
    if vector is None or not groups:
        return vector
    return (vector if vector.dim() > 1 else vector.expand(groups, -1)).contiguous()


def _shared(totals: torch.Tensor | None, operand: torch.Tensor | None) -> torch.Tensor | None:
    """The same of what may not be there, or not be due."""
    if totals is None or operand is None:
        return None
    return shared_sum(totals, operand)

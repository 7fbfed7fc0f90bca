"""The backward pass of gated norms by kernels: the gradients of rows and gates, and sums for those of weight and bias.

Programs each take rows, and of groups of columns those of one, and leave sums of their own, added up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ..codegen.model import Mode
from ..codegen.values import Direction, GateActivation, Gating, Norm
from ..dtypes import DTYPES
from ..kernels.row_walk import RowStride
from ..mode_words import word
from ..upstream.torch_dynamo import eager_only
from .canonical import in_place_of
from .gated_instead import Kept, Told
from .row_gradients import Kind, Tensors, in_memory, kind_of, plan_of, shared_sum, sum_dtype
from .row_layout import row_stride, walkable

# The second dimension of a grid takes 65535, and each group has a program or more.
_MOST_GROUPS = 2**15

TENSORS = Tensors(
    names=("dy", "x", "gate", "weight", "bias", "mean", "rstd", "dx", "dgate"),
    with_rows=("dy", "x", "gate", "dx", "dgate"),
    read=("dy", "x", "gate"),
    sums=("dweight", "dbias"),
    shared="groups",
)


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


def stand_in(
    mode: Mode,
    n: int,
    own: torch.dtype,
    dtypes: Mapping[str, torch.dtype | None],
    misaligned: Collection[str],
) -> Kind:
    """What launches are alike in whose rows adjoin, whose tensors are of a type of their own, and that sum all."""
    single = torch.float32
    centre = single if mode.norm.centres else None
    found = {**dict.fromkeys(TENSORS.names, own), "mean": centre, "rstd": single, **dtypes}
    left = [dtypes.get(name) for name in ("weight", "bias")]
    if not mode.norm.centres or not mode.gating.is_after:
        found["bias"] = None
    # Of groups rows lie a whole row of them apart, and how far that is no kernel is compiled for.
    strides = tuple([2 * n if mode.grouped else n for _ in TENSORS.with_rows])
    return Kind(mode, TENSORS, n, (*[found[name] for name in TENSORS.names], *left), strides, frozenset(misaligned))


def takes(kept: Kept, dy: torch.Tensor) -> bool:
    """Whether kernels compute the gradients of a call: of tensors in memory."""
    return in_memory((*kept, dy)) and kept.x.numel() > 0 and _groups(kept) <= _MOST_GROUPS


def _groups(kept: Kept) -> int:
    """How many groups of columns have a weight or bias of their own; 0 if it is one for all."""
    return max(
        [0, *[vector.shape[0] for vector in (kept.weight, kept.bias) if vector is not None and vector.dim() > 1]]
    )


@eager_only
def gradients(kept: Kept, told: Told, dy: torch.Tensor, due: Sequence[bool]) -> list[torch.Tensor | None]:
    """What `gated_instead.gradients` returns of the same arguments, where `takes` has passed them."""
    for_x, for_gate, for_weight, for_bias = due
    x, n, groups = kept.x, kept.x.shape[-1], _groups(kept)
    m = x.numel() // n
    mode = mode_of(told, x.dtype, groups > 0)
    # Of groups the rows of one are as far apart as all of them are long.
    rows = [tensor.flatten(-2) if groups else tensor for tensor in (dy, x, kept.gate)]
    made = [
        kept.x.new_empty(rows[1].shape, dtype=dtype) if needed else None
        for needed, dtype in zip((for_x, for_gate), told.dtypes, strict=False)
    ]
    by_name = zip(TENSORS.with_rows, [*map(walkable, rows), *made], strict=True)
    tensors: dict[str, torch.Tensor | None] = {
        **dict(by_name),
        "weight": _of_groups(kept.weight, groups),
        "bias": _of_groups(kept.bias, groups) if mode.gating.is_after else None,
        "mean": kept.mean,
        "rstd": kept.rstd,
    }
    tensors = in_place_of(tensors, n, TENSORS.with_rows)
    strides = {name: _stride(tensors[name]) for name in TENSORS.with_rows}
    parts = groups or 1
    shared = {"dweight": (kept.weight, for_weight), "dbias": (kept.bias, for_bias)}
    # A vector for all of several groups is added up once more.
    sums = {
        name: sum_dtype(vector, parts) for name, (vector, needed) in shared.items() if needed and vector is not None
    }
    plan = plan_of(kind_of(mode, TENSORS, n, tensors, strides, sums), x.device)
    totals = plan.launch(m, parts, parts, tensors, told.weight_offset)
    found = [
        *[None if tensor is None else tensor.view(x.shape) for tensor in made],
        _shared(totals.get("dweight"), kept.weight),
        _shared(totals.get("dbias"), kept.bias),
    ]
    return [
        gradient.to(dtype) if gradient is not None and dtype is not None else None
        for gradient, dtype in zip(found, told.dtypes, strict=True)
    ]


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


def _stride(tensor: torch.Tensor | None) -> RowStride:
    return 0 if tensor is None else row_stride("rows", tensor)

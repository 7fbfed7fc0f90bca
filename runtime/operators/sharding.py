"""The rules of operators for DTensors: each rank computes its rows; `calls.sharded` decides the placements.

The rules are the dispatcher's (`torch.library.register_torch_dispatch`). `register_sharding` does not fit: it has one
placement for all tensors of a list, which these operators return, and DTensor caches its answer for a call by tensors
and integers, and ignores words and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..calls.check import refuse_sharded
from ..calls.functions import OPERATORS, Function
from ..calls.outputs import group_scales
from ..calls.row_layout import walkable
from ..calls.sharded import Frame
from ..codegen.families import Kind, Result
from ..codegen.groups import GROUP
from ..codegen.values import Direction, ScaleLayout
from ..errors import LayoutError
from ..families.group import row as group
from ..upstream.torch_dtensor import assembled
from .computing import PUBLIC, run_named
from .kernels import NAMESPACE, both


def register(library: torch.library.Library) -> None:
    """Give every operator of `OPERATORS`, which a library defines, its rule. This imports DTensor."""
    from torch.distributed.tensor import DTensor

    def rule(defined: str, bound: Callable[..., Any]) -> None:
        torch.library.register_torch_dispatch(f"{NAMESPACE}::{defined}", DTensor, torch.no_grad()(bound), lib=library)

    for name, takes in OPERATORS.items():
        function = PUBLIC.get(name, partial(run_named, function=name))
        for own, outs in {name: {}, f"{name}_into": dict(takes.outs)}.items():
            if outs or own == name:
                for defined, compute in both(own, function).items():
                    rule(defined, partial(_sharded, takes, outs, compute))


def _sharded(
    takes: Function,
    outs: Mapping[str, str],
    function: Callable[..., Any],
    cls: type,
    operator: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: Any = None,
) -> Sequence[torch.Tensor]:
    """Return the results of an operator for DTensors; `args` are all arguments, in order.

    An operator that writes to outs returns the other results, as tensors without elements if not asked for.
    """
    operands = dict(zip((*takes.passed, *outs), args, strict=True))
    frame = _frame(operator, operands, takes)
    written = {out: _written(frame, out, operands[out]) for out in outs if operands[out] is not None}
    results = function(**_parts(frame, takes, operands), **written)
    returned = []
    for row, part in zip(takes.family.results, results, strict=True):
        if part is None:
            returned += [_nothing(frame)] if outs and row.name not in outs.values() else []
        elif row.name not in outs.values():
            returned.append(_whole(frame, takes, row, part, operands))
    return tuple(returned) if outs else returned


def _whole(frame: Frame, takes: Function, row: Result, part: torch.Tensor, operands: Mapping[str, Any]) -> torch.Tensor:
    """Return the whole of a rank's part of a result."""
    if row.name == "y_scale" and "scale_layout" in operands:
        return _scales(frame, part, operands)
    if row.kind is Kind.PER_NORM:
        raise LayoutError(
            "save_mv was passed with rows that are sharded, and the statistics of both norms are one tensor; pass each "
            "rank's part, x.to_local(), or call normforge.layer_norm_add or rms_norm_add"
        )
    if row.kind is Kind.PER_ROW and takes.family_name == GROUP:
        shape = torch.Size((part.shape[0], frame.like.shape[0], part.shape[2]))
        return assembled(part, frame.like, shape, _of_statistics(frame))
    if row.kind is Kind.IMAGES:
        return frame.whole(Kind.ROWS, part.contiguous())
    # A gradient has the shape of its operand.
    is_gradient = takes.direction is Direction.BACKWARD and row.kind is not Kind.ROWS
    return frame.whole(row.kind, part, operands[row.like[0]] if is_gradient else None)


def _frame(operator: Any, operands: Mapping[str, Any], takes: Function) -> Frame:
    if operands.get("dropout_rng") is not None:
        refuse_sharded(operands["x"])
    tensors = {name: each for name, each in operands.items() if isinstance(each, torch.Tensor)}
    # All groups of a row are on one rank, and so are the weights of groups.
    grouped = any(name in tensors and tensors[name].dim() > 1 for name, _ in takes.by_groups)
    samples = takes.family_name == GROUP
    return Frame(str(operator), tensors, operands["x"].dim() - 1 if samples else 2 if grouped else 1)


def _parts(frame: Frame, takes: Function, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a rank's call, without outs."""
    parts = {name: operands[name] for name in takes.passed}
    for name, kind, _ in takes.tensors:
        if kind is Kind.PER_ROW and takes.family_name == GROUP:
            parts[name] = operands[name].redistribute(placements=_of_statistics(frame)).to_local()
            continue
        part = frame.part(kind, operands[name])
        # Kernels can walk the strides of the whole, but not always those of a part.
        if part is not None and kind.has_row_stride:
            part = walkable(part)
        elif kind is Kind.IMAGES and group.are_channels_last(part) is None:
            part = part.contiguous()
        parts[name] = part
    return parts


def _scales(frame: Frame, part: torch.Tensor, operands: Mapping[str, Any]) -> torch.Tensor:
    """Return a DTensor of a rank's scales, per row or per group: sharded as the rows are, in the layout of each part.

    Raises:
        LayoutError: scales are in tiles, and the rows of a tile are on several ranks.
    """
    x, layout = frame.like, ScaleLayout(operands["scale_layout"])
    columns = part.shape[x.dim() - 1 :]
    if layout.swizzles:
        if frame.deals:
            raise LayoutError(
                "scale_layout 'swizzled_128x4' was passed with rows that are sharded, and a tile has 128 rows of one "
                "rank; pass each rank's part, x.to_local(), or another scale_layout"
            )
        return assembled(part, x, part.shape, frame.of_vectors)
    if not columns:
        return frame.whole(Kind.PER_ROW, part)
    m, on_meta = x.numel() // x.shape[-1], partial(torch.empty, device="meta")
    whole = group_scales(on_meta, x.shape[:-1], m, columns[0], part.dtype, layout)
    return assembled(part, x, whole.shape, frame.of_rows, whole.stride())


def _written(frame: Frame, name: str, whole: Any) -> torch.Tensor:
    """Return a rank's part of an out; an out cannot be redistributed."""
    if whole.placements != frame.of_rows:
        raise LayoutError(
            f"{name} has placements {whole.placements} and what is written there {frame.of_rows}; give it those, or "
            "leave it out"
        )
    part: torch.Tensor = whole.to_local()
    return part


def _nothing(frame: Frame) -> torch.Tensor:
    """Return a tensor without elements, for a result that was not asked for."""
    x = frame.like
    return assembled(x.to_local().new_empty(0), x, torch.Size([0]), frame.of_vectors)


def _of_statistics(frame: Frame) -> tuple[Any, ...]:
    """Return the placements of GroupNorm's statistics, (2, B, groups), for sharded samples."""
    from torch.distributed.tensor import Shard

    return tuple(
        [Shard(1) if row != vector else vector for row, vector in zip(frame.of_rows, frame.of_vectors, strict=True)]
    )

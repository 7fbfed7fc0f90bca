"""What the operators do with DTensors: each rank computes its rows; `calls.sharded` says where tensors lie.

The rules are the dispatcher's (`torch.library.register_torch_dispatch`). `register_sharding` has one placement for all
tensors of a list, which is what these operators return; and DTensor remembers what it says of a call by the tensors and
integers of that, whatever words and types it was given besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..calls.functions import FUNCTIONS, Function
from ..calls.randomness import refuse_sharded
from ..calls.row_layout import walkable
from ..calls.sharded import Frame
from ..codegen.families import Kind
from ..errors import LayoutError
from ..upstream.torch_dtensor import assembled
from .twins import both

Straight = Mapping[str, Callable[..., Any]]


def register(library: torch.library.Library, namespace: str, straight: Straight) -> None:
    """Give every operator its rule. This imports DTensor.

    Args:
        library: where they are defined.
        namespace: under what name.
        straight: the functions that compute, by name.
    """
    from torch.distributed.tensor import DTensor

    for name, function in straight.items():
        rules: dict[str, Callable[..., Any]] = {name: _sharded}
        if FUNCTIONS[name].places:
            rules[f"{name}_into"] = _sharded_into
        for own, rule in rules.items():
            for defined, compute in both(own, function).items():
                bound = partial(rule, FUNCTIONS[name], compute)
                torch.library.register_torch_dispatch(f"{namespace}::{defined}", DTensor, bound, lib=library)


@torch.no_grad()
def _sharded(
    takes: Function,
    function: Callable[..., Any],
    cls: type,
    operator: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: Any = None,
) -> list[torch.Tensor]:
    """What an operator returns of DTensors; `args` are all its arguments, in order."""
    given = dict(zip(takes.passed, args, strict=True))
    frame = _frame(operator, given, takes)
    results = function(**_parts(frame, takes, given))
    kinds = [row.kind for row in takes.family.results]
    return [frame.whole(kind, part) for kind, part in zip(kinds, results, strict=True) if part is not None]


@torch.no_grad()
def _sharded_into(
    takes: Function,
    function: Callable[..., Any],
    cls: type,
    operator: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Likewise what one returns that writes where it is told, of no elements where there is nothing to return."""
    places = dict(takes.places)
    given = dict(zip((*takes.passed, *places), args, strict=True))
    frame = _frame(operator, given, takes)
    written = {place: _written(frame, place, given[place]) for place in places if given[place] is not None}
    results = function(**_parts(frame, takes, given), **written)
    returned = []
    for row, part in zip(takes.family.results, results, strict=True):
        if row.name not in places.values():
            returned.append(_nothing(frame) if part is None else frame.whole(row.kind, part))
    return tuple(returned)


def _frame(operator: Any, given: Mapping[str, Any], takes: Function) -> Frame:
    if given.get("dropout_rng") is not None:
        refuse_sharded(given["x"])
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    # The groups of a row are together, as what they have of their own is.
    grouped = any(name in tensors and tensors[name].dim() > 1 for name, _ in takes.by_groups)
    return Frame(str(operator), tensors, 2 if grouped else 1)


def _parts(frame: Frame, takes: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of a rank is given, but for places."""
    parts = {name: given[name] for name in takes.passed}
    for name, kind, _ in takes.tensors:
        part = frame.part(kind, given[name])
        # The whole has strides that a kernel can walk, and a part that was cut out of one need not have them.
        parts[name] = walkable(part) if part is not None and kind is Kind.ROWS else part
    return parts


def _written(frame: Frame, name: str, whole: Any) -> torch.Tensor:
    """A rank's part of what is written to, which nothing can be moved to."""
    if whole.placements != frame.of_rows:
        raise LayoutError(
            f"{name} has placements {whole.placements} and what is written there {frame.of_rows}; give it those, or "
            "leave it out"
        )
    part: torch.Tensor = whole.to_local()
    return part


def _nothing(frame: Frame) -> torch.Tensor:
    """What is returned in place of a result that was not asked for."""
    x = frame.like
    return assembled(x.to_local().new_empty(0), x, torch.Size([0]), frame.of_vectors)

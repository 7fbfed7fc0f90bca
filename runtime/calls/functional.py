"""Calls of the functional API: by the names of the rows, as the forward functions take them, and as one operator.

Such a call is two tuples, `public.Operands` and `public.Options`; only what reads a part of them knows the part.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from ..codegen.families import Family, Kind
from ..codegen.parameters import BACKWARD, FORWARD
from ..codegen.values import Cast
from ..mode_words import word
from ..upstream.torch_dynamo import constant_in_traces
from .public import Operands, Options
from .row_layout import as_rows
from .traced import operated, result_dtype

# By the norm's word, because torch 2.11's TorchDynamo can make no enum of it.
FORWARD_OF = {norm.value: name for norm, name in FORWARD.functions.items()}
BACKWARD_OF = {norm.value: name for norm, name in BACKWARD.functions.items()}

# Of the operands, with their kinds, and of the options behind the norm.
OPERANDS = tuple((row.name, row.kind) for row in FORWARD.parameters if row.functional and row.kind.is_tensor)
_OPTIONS = tuple(row.name for row in FORWARD.parameters if row.functional and not row.kind.is_tensor)


class BackwardRows(NamedTuple):
    """The rows of the backward passes of a family.

    Attributes:
        look_up: the name of their look-up in `native.calls`.
        operands: the names of the tensors.
        options: the names of the options behind the norm.
    """

    look_up: str
    operands: tuple[str, ...]
    options: tuple[str, ...]


def backward_rows(family: Family, look_up: str) -> BackwardRows:
    """Return the rows of a family."""
    told = [row for row in family.parameters if row.functional]
    operands, options = ([row.name for row in told if row.kind.is_tensor is is_tensor] for is_tensor in (True, False))
    return BackwardRows(look_up, tuple(operands), tuple(options))


@constant_in_traces
def _names() -> tuple[str, ...]:
    return (*(name for name, _ in OPERANDS), *_OPTIONS)


@constant_in_traces
def _kinds() -> tuple[Kind, ...]:
    return tuple([kind for _, kind in OPERANDS])


def named(operands: Operands, options: Options) -> dict[str, Any]:
    """What a call is given, but for the norm, by the names of its rows."""
    return dict(zip(_names(), (*operands, *options[1:]), strict=True))


def backward_named(rows: BackwardRows, operands: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Any]:
    """The same of a backward call."""
    given: dict[str, Any] = dict(zip(rows.operands, operands, strict=True))
    given.update(zip(rows.options, options[1:], strict=True))
    return given


def as_operands(operands: Operands, dimensions: int) -> Operands:
    """Operands as the forward functions take them, N being the last `dimensions` of x together."""
    found = [
        None
        if operand is None
        else operand.flatten().contiguous()
        if kind is Kind.VECTOR
        else as_rows(operand, dimensions)
        for kind, operand in zip(_kinds(), operands, strict=True)
    ]
    return cast("Operands", tuple(found))


def forward_given(rows: Operands, options: Options, save_mv: bool) -> dict[str, Any]:
    """The arguments of the forward function by name; those that are missing have their defaults."""
    given = named(rows, options)
    given["save_mv"] = save_mv
    given["cast"] = word(Cast, "cast", given["cast"]).value
    given["out_dtype"] = given["out_dtype"] or result_dtype(options[0], given["x"])
    if given["residual"] is not None:
        given["fadd"] = "pre_add_store"
    return given


def normalise_traced(
    operands: Operands,
    shape: tuple[int, ...],
    options: Options,
    dropout: tuple[float, torch.Tensor | None] = (0.0, None),
) -> Any:
    """What `recorded.normalise` is, as one operator and the views and copies before it.

    Args:
        operands: see `recorded.normalise`.
        shape: likewise.
        options: likewise.
        dropout: what is dropped of x before a residual is added, by what seed and offset.
    """
    rows = as_operands(operands, len(shape))
    # As `records`, each name of which TorchDynamo would guard.
    saves = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in rows)
    given = forward_given(rows, options, saves)
    given["dropout_p"], given["dropout_rng"] = dropout
    y, *others = operated(FORWARD_OF[options[0]], given)
    x, _, _, residual, _ = operands
    return y.view(x.shape) if residual is None else (y.view(x.shape), others[0].view(x.shape))

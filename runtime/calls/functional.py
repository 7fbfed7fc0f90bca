"""Calls of the functional API: by the names of the rows, as the forward functions take them, and as one operator.

Such a call is two tuples, `public.Operands` and `public.Options`; only what reads a part of them knows the part.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ..codegen.families import Kind
from ..codegen.parameters import BACKWARD, FORWARD
from ..codegen.values import Cast
from ..mode_words import word
from ..upstream.torch_dynamo import constant_in_traces
from .functions import function_named
from .public import BackwardOperands, BackwardOptions, Operands, Options
from .row_layout import as_rows
from .traced import operated, result_dtype

# By the norm's word, because torch 2.11's TorchDynamo can make no enum of it.
FORWARD_OF = {norm.value: name for norm, name in FORWARD.functions.items()}
BACKWARD_OF = {norm.value: name for norm, name in BACKWARD.functions.items()}

# Of the operands, with their kinds, and of the options behind the norm.
OPERANDS = tuple((row.name, row.kind) for row in FORWARD.parameters if row.functional and row.kind.is_tensor)
_OPTIONS = tuple(row.name for row in FORWARD.parameters if row.functional and not row.kind.is_tensor)

_BACKWARD = [row for row in BACKWARD.parameters if row.functional]
_BACKWARD_OPERANDS = tuple(row.name for row in _BACKWARD if row.kind.is_tensor)
_BACKWARD_OPTIONS = tuple(row.name for row in _BACKWARD if not row.kind.is_tensor)


@constant_in_traces
def _names() -> tuple[str, ...]:
    return (*(name for name, _ in OPERANDS), *_OPTIONS)


@constant_in_traces
def _kinds() -> tuple[Kind, ...]:
    return tuple([kind for _, kind in OPERANDS])


def named(operands: Operands, options: Options) -> dict[str, Any]:
    """What a call is given, but for the norm, by the names of its rows."""
    return dict(zip(_names(), (*operands, *options[1:]), strict=True))


def backward_named(operands: BackwardOperands, options: BackwardOptions) -> dict[str, Any]:
    """The same of a backward call."""
    given: dict[str, Any] = dict(zip(_BACKWARD_OPERANDS, operands, strict=True))
    given.update(zip(_BACKWARD_OPTIONS, options[1:], strict=True))
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


def taken(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Of arguments by name those that a function takes."""
    takes = function_named(function).passed
    return {name: value for name, value in given.items() if name in takes}


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

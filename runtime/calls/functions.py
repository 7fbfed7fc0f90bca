"""The functions that calls are made to, as loops over the rows of `codegen.parameters` want them: by what is done."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple, get_type_hints

import torch

from ..codegen.families import REQUIRED, Family, Kind, Parameter, Result
from ..codegen.model import Mode
from ..codegen.parameters import FAMILIES, GRADIENTS, GROUP, GROUP_BWD, IN_PARTS
from ..codegen.values import Direction, DType, Norm
from ..upstream.torch_internals import constant_in_traces

_CLASSES = get_type_hints(Mode)

# The tensors that are read.
_OPERANDS = tuple(kind for kind in Kind if kind.is_tensor and kind is not Kind.OUT)


class Function(NamedTuple):
    """The fields of a function that calls read, by their use.

    Plain values, because TorchDynamo follows this code: it reads no property of a frozen dataclass.

    Attributes:
        family: that it is of.
        norm: its.
        direction: whether it computes gradients.
        family_name: the name of its family; "" of the norms alone.
        defaults: what it is given where nothing is passed, by name, for all parameters of its family.
        passed: the names of its own, but for the outs; in their order, which is that of the operator's schema.
        words: names, with the enums of their members and the axes that they decide.
        numbers: names, with the least and the most that each takes.
        flags: names, with the axes that they decide.
        dtypes: names, with the axes that they decide, and whether None may be passed.
        tensors: the names of what is read, with its kind, and whether None may be passed.
        arguments: the names of those that callers pass as another argument, with what errors call them.
        by_dtype: names of tensors whose dtype decides an axis, with that.
        by_presence: names of those that decide one by being there, with that and its values without and with them.
        by_groups: names of those that decide one by being one a group, with that.
        needs: names of numbers, with what has to be there unless they are 0, and the error if it is not.
        conditions: names, with the attribute of a mode that says whether it reads them, and the errors if it does
            and they were not passed, and the other way round.
        outs: the names of what is written to, with the result that goes there.
        results: what it may return.
        gradients: names, with the result of the backward family that is the gradient.
    """

    family: Family
    norm: Norm
    direction: Direction
    family_name: str
    defaults: tuple[tuple[str, Any], ...]
    passed: tuple[str, ...]
    words: tuple[tuple[str, type[Enum], str], ...]
    numbers: tuple[tuple[str, float, float], ...]
    flags: tuple[tuple[str, str], ...]
    dtypes: tuple[tuple[str, str, bool], ...]
    tensors: tuple[tuple[str, Kind, bool], ...]
    arguments: Mapping[str, str]
    by_dtype: tuple[tuple[str, str], ...]
    by_presence: tuple[tuple[str, str, Any, Any], ...]
    by_groups: tuple[tuple[str, str], ...]
    needs: tuple[tuple[str, str, str], ...]
    conditions: tuple[tuple[str, str, str, str], ...]
    outs: tuple[tuple[str, str], ...]
    results: tuple[Result, ...]
    gradients: tuple[tuple[str, str], ...]


def _function(family: Family, norm: Norm) -> Function:
    rows = family.of(norm)
    read = [row for row in rows if row.kind in _OPERANDS]
    deciding = [(row, _CLASSES[row.axis]) for row in read if row.axis and row.kind is not Kind.GROUPS]
    return Function(
        family=family,
        norm=norm,
        direction=family.direction,
        family_name=family.name,
        defaults=tuple((row.name, _default(row, norm)) for row in family.parameters),
        passed=tuple(dict.fromkeys(row.operator_argument for row in rows if row.kind is not Kind.OUT)),
        words=tuple((row.name, row.words, row.axis) for row in rows if row.words is not None),
        numbers=tuple((row.name, row.least, row.most) for row in rows if row.kind is Kind.NUMBER),
        flags=tuple((row.name, row.axis) for row in rows if row.kind is Kind.FLAG),
        dtypes=tuple((row.name, row.axis, row.is_optional) for row in rows if row.kind is Kind.DTYPE),
        tensors=tuple(dict.fromkeys((row.operator_argument, row.kind, row.is_optional) for row in read)),
        arguments={row.name: row.argument for row in read if row.argument},
        by_dtype=tuple((row.name, row.axis) for row, kind in deciding if kind is DType),
        by_presence=tuple(
            (row.name, row.axis, *_without_and_with(row, kind)) for row, kind in deciding if kind is not DType
        ),
        by_groups=tuple((row.name, row.axis) for row in read if row.kind is Kind.GROUPS),
        needs=tuple((row.name, row.needs, row.absent) for row in rows if row.needs),
        conditions=tuple((row.name, row.wanted, row.absent, row.unused) for row in rows if row.wanted),
        outs=tuple((row.name, row.result) for row in rows if row.kind is Kind.OUT),
        results=tuple(row for row in family.results if norm in row.norms),
        gradients=tuple((row.name, row.gradient) for row in rows if row.gradient),
    )


def _default(row: Parameter, norm: Norm) -> Any:
    # A norm that lacks a parameter computes what the default of another norm says.
    text = row.default.get(norm, next(iter(row.default.values())))
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    return None if text == REQUIRED else ast.literal_eval(text)


def _without_and_with(row: Parameter, kind: type[Any]) -> tuple[Any, Any]:
    """Return the values of an axis without and with a tensor: False and True, or the first word that says so."""
    if kind is bool:
        return False, True
    _, _, says = row.wanted.rpartition(".")
    without, there = (next(word for word in kind if getattr(word, says) is asked) for asked in (False, True))
    return without, there


def _functions(families: Iterable[Family]) -> dict[str, Function]:
    return {name: _function(family, norm) for family in families for norm, name in family.functions.items()}


# The functions, and those of operators alone, which compute gradients, by their names.
FUNCTIONS = _functions(dict.fromkeys((*FAMILIES, *GRADIENTS.values())))
# The functions whose operands are checked elsewhere, by their names.
UNCHECKED = _functions((*IN_PARTS, GROUP, GROUP_BWD))
# The functions that have operators, by their names.
OPERATORS = FUNCTIONS | _functions((GROUP, GROUP_BWD))


def _constant(value: Any) -> Any:
    """Return what a value says in words, numbers, classes and tuples; None for any other object.

    For an object that is both in a constant and in the tables, TorchDynamo would guard that the two are the same, and
    guards cannot read the constant.
    """
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, (str, float, int, type, torch.dtype)) else None


_CONSTANTS = {name: Function(*map(_constant, function)) for name, function in FUNCTIONS.items()}


@constant_in_traces
def function_named(name: str) -> Function:
    """Return a function of `FUNCTIONS` in words, for the functional API, which compiled models call.

    What TorchDynamo reads of the table itself, compiled code looks at again in each call: 224 of the 717 lines of
    guards that `patch` added to GPT-2.
    """
    return _CONSTANTS[name]


def completed(function: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function by name, completed by defaults."""
    return {**dict(function_named(function).defaults), **args}

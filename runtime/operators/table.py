"""The functions that have operators, by name, with the arguments that operators take."""

from __future__ import annotations

from collections.abc import Mapping

from ..calls.functions import FUNCTIONS, UNCHECKED, Function
from ..codegen import parameters
from ..codegen.families import Kind, Parameter

# The families of operators that compute the gradients of a family's calls, by the name of that family.
GRADIENTS = {**parameters.GRADIENTS, parameters.GROUP.name: parameters.GROUP_BWD}


def argument_of(row: Parameter) -> str:
    """Return the name of an operator's argument: GroupNorm's operators take mean and rstd as one tensor."""
    return row.argument if row.argument and row.kind is Kind.PER_ROW else row.name


def _of_operator(takes: Function) -> Function:
    """Return a function with the arguments of its operator."""
    names = {row.name: argument_of(row) for row in takes.family.parameters}
    tensors = [(names[name], kind, optional) for name, kind, optional in takes.tensors]
    passed = [names[name] for name in takes.passed]
    return takes._replace(passed=tuple(dict.fromkeys(passed)), tensors=tuple(dict.fromkeys(tensors)))


_OF_GROUPS = (*parameters.GROUP.functions.values(), *parameters.GROUP_BWD.functions.values())
OPERATORS: Mapping[str, Function] = {**FUNCTIONS, **{name: _of_operator(UNCHECKED[name]) for name in _OF_GROUPS}}

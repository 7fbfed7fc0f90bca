"""What calls of differentiable norms with a neighbour go through, known or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function

from ..calls import neighbours
from ..calls.argument_checks import check_tensor
from ..calls.backend import backend, left_to_torch
from ..calls.check import check_normalised
from ..calls.neighbours import Neighbour, Operands, Options
from ..calls.sharded import Frame, is_sharded
from ..calls.traced import becomes_operator, result_dtype, unrecorded
from ..codegen.families import Kind


def normalise(calls: Neighbour, operands: Operands, options: Options) -> Any:
    """What a call comes to, of tensors that no class of their own asks to be handed.

    Args:
        calls: the family's row.
        operands: the tensors.
        options: what else the call is told, numbers as they were passed.
    """
    x = operands[0]
    check_tensor("x", x)
    kernel = backend(x) == "kernel"
    left = left_to_torch(operands)
    with unrecorded():
        given = neighbours.named(calls, operands, options)
        check_normalised(calls.functions[options[0]], given, x.shape[-1:], kernel=kernel and not left)
    numbers = ("eps", "weight_offset")
    told = zip(calls.options, options[1:], strict=True)
    said = (options[0], *[float(value) if name in numbers else value for name, value in told])
    if not kernel or left:
        *others, out_dtype, saves = said
        return calls.eager(operands, (*others, out_dtype or result_dtype(options[0], x), saves))
    if is_sharded(*operands):
        return _by_parts(calls, operands, said)
    traced = becomes_operator(*operands)
    # What is known is known by what was passed, and by what surrounds it.
    return (neighbours.normalise_traced if traced else neighbours.normalise)(calls, operands, said)


def _by_parts(calls: Neighbour, operands: Operands, options: Options) -> Any:
    """A call of DTensors: each rank normalises its rows, as the call of plain tensors that it then is."""
    frame = Frame(calls.functions[options[0]], dict(zip(calls.inputs, operands, strict=True)))
    parts = tuple([frame.part(row.kind, part) for row, part in zip(calls.rows, operands, strict=True)])
    made = normalise(calls, parts, options)
    if isinstance(made, tuple):
        return tuple([frame.whole(Kind.ROWS, each) for each in made])
    return frame.whole(Kind.ROWS, made)


def handed_on(function: Callable[..., Any], operands: Operands, given: dict[str, Any], positional: int) -> Any:
    """What the class of an operand makes of a call (`__torch_function__`).

    Args:
        function: what was called.
        operands: its tensors.
        given: its arguments by name.
        positional: how many of them are handed on without.
    """
    names = list(inspect.signature(function).parameters)
    first = [given[name] for name in names[:positional]]
    return handle_torch_function(function, operands, *first, **{name: given[name] for name in names[positional:]})

"""What calls of differentiable norms with a neighbour go through, known or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function, has_torch_function

from ..calls import neighbours
from ..calls.argument_checks import check_tensor
from ..calls.backend import backend, left_to_torch
from ..calls.check import check_normalised
from ..calls.known import PLAIN
from ..calls.neighbours import Neighbour, Operands, Options
from ..calls.sharded import is_sharded
from ..calls.traced import intercepted, is_dynamo_compiling, keeps_for_recomputation, unrecorded

# Torch's operators, given the tensors and the options.
Instead = Callable[[Any, Any], Any]


def normalise(calls: Neighbour, instead: Instead, operands: Operands, options: Options) -> Any:
    """What a call comes to, of tensors that no class of their own asks to be handed.

    Args:
        calls: the family's row.
        instead: what serves where no kernel runs.
        operands: the tensors.
        options: what else the call is told, numbers as they were passed.
    """
    x = operands[0]
    check_tensor("x", x)
    kernel = backend(x) == "kernel"
    left = left_to_torch(operands) or is_sharded(*operands)
    with unrecorded():
        given = neighbours.named(calls, operands, options)
        check_normalised(calls.functions[options[0]], given, x.shape[-1:], kernel=kernel and not left)
    numbers = ("eps", "weight_offset")
    told = zip(calls.options, options[1:], strict=True)
    said = (options[0], *[float(value) if name in numbers else value for name, value in told])
    if not kernel or left:
        return instead(operands, said)
    traced = is_dynamo_compiling() or (intercepted(*operands) and not keeps_for_recomputation())
    # What is known is known by what was passed, and by what surrounds it.
    return (neighbours.normalise_traced if traced else neighbours.normalise)(calls, operands, said)


def is_handed_on(operands: Operands) -> bool:
    """Whether the class of an operand is to be asked what it makes of a call, as torch.fx's proxies are."""
    strange = any(type(operand) not in PLAIN for operand in operands if operand is not None)
    return strange and has_torch_function(operands)


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

"""Launch differentiable calls of modulated and gated norms, known or not."""

from __future__ import annotations

from typing import Any

from ..calls import road
from ..calls.argument_checks import check_tensor
from ..calls.backend import backend, left_to_torch
from ..calls.check import check_normalised
from ..calls.road import FamilyCalls, Operands, Options
from ..calls.sharded import is_sharded
from ..calls.traced import becomes_operator, result_dtype, unrecorded
from .plain_functions import by_parts


def normalise(calls: FamilyCalls, operands: Operands, options: Options) -> Any:
    """Check and run a call whose operands leave it to normforge, and return its outputs.

    Args:
        calls: the family's row.
        operands: the tensors.
        options: the norm's word and the other arguments, numbers as they were passed.
    """
    x = operands[0]
    check_tensor("x", x)
    kernel = backend(x) == "kernel"
    left = left_to_torch(operands)
    with unrecorded():
        given = road.named(calls, operands, options)
        check_normalised(calls.functions[options[0]], given, x.shape[-1:], kernel=kernel and not left)
    numbers = ("eps", "weight_offset")
    told = zip(calls.options, options[1:], strict=True)
    said = (options[0], *[float(value) if name in numbers else value for name, value in told])
    if not kernel or left:
        *others, out_dtype, saves = said
        return calls.eager(operands, (*others, out_dtype or result_dtype(options[0], x), saves))
    if is_sharded(*operands):
        function = calls.functions[options[0]]
        return by_parts(function, calls.rows, operands, lambda parts: normalise(calls, parts, said))
    traced = becomes_operator(*operands)
    # What is known is known by what was passed, and by what surrounds it.
    return (road.normalise_traced if traced else road.normalise)(calls, operands, said)

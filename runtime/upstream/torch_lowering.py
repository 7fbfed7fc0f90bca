"""What the code that Inductor writes calls in place of an operator.

Inductor writes a call of `torch.ops.ns.name.default` for an operator that it makes no code of, and torch's dispatcher
takes some 8 us to hand 17 arguments to a kernel in Python. What is written is decided by
`FallbackKernel.set_python_kernel_name`. That is Inductor's own and may change, so it is used here alone, and where
anything that this takes is missing, the operator is called as ever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .imports import when_imported

Operator = torch._ops.OpOverload[Any, Any]

# What an operator's attribute is called that Inductor's code calls. Code from Inductor's cache, which another process
# wrote, finds it too.
AT_ONCE = "at_once"

_LOWERING = "torch._inductor.lowering"

_log = logging.getLogger(__name__)


def called_at_once(functions: Mapping[Operator, Callable[..., Any]]) -> None:
    """Have Inductor's code call functions in place of operators, with the same arguments, by position.

    Inductor is not imported for it. What it writes in C++, or as a graph, calls the operators.
    """
    for operator, function in functions.items():
        setattr(operator, AT_ONCE, function)
    when_imported(_LOWERING, functools.partial(_lower, tuple(functions)))


def _lower(operators: tuple[Operator, ...]) -> None:
    from torch._inductor import ir
    from torch._inductor import lowering as inner

    # torch declares no types for it.
    lowering: Any = inner
    try:
        needed = (ir.FallbackKernel.set_python_kernel_name, lowering.constrain_to_fake_tensors)
        for operator in operators:
            if operator not in lowering.lowerings:
                lowering.make_fallback(operator, needed[1], warn=False)
                lowering.lowerings[operator] = _renaming(operator, lowering.lowerings[operator])
    except (AssertionError, AttributeError, ImportError, KeyError, TypeError):
        _log.debug("this Inductor is another than is known; its code calls operators", exc_info=True)


def _renaming(operator: Operator, lower: Callable[..., Any]) -> Callable[..., Any]:
    """Lower an operator as Inductor does, and give what comes of it the name that is called."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    @functools.wraps(lower)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        before = len(graph.operations)
        made = lower(*args, **kwargs)
        if not (kwargs or graph.cpp_wrapper or getattr(graph, "fx_wrapper", False)):
            for each in graph.operations[before:]:
                if isinstance(each, ir.FallbackKernel) and each.op_overload is operator:
                    each.set_python_kernel_name(f"{each.python_kernel_name}.{AT_ONCE}")
        return made

    return renamed

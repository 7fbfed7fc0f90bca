"""Calls that a graph is traced of: they become operators, with what is checked before them and what is copied.

TorchDynamo, which torch.compile reads programs with, follows this code, and `is_dynamo_compiling` is True to it alone.
make_fx, torch.export and fake tensors see operators instead, as modes and subclasses of torch's dispatcher do. Either
question is one C call or less for an eager call, 0.05 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as is_dynamo_compiling

from ..codegen.families import Family
from ..codegen.values import Direction, Norm
from ..selection.invariance import is_on
from ..upstream.torch_internals import constant_in_traces, jit_tracing, saved_tensors_hooks
from ..upstream.torch_internals import global_hooks as global_hooks
from .backend import intercepted as intercepted
from .check import Call, check, refuse_gradient
from .functions import completed, function_named
from .outputs import LayerNormOutput, NormGradients


def unrecorded() -> AbstractContextManager[object]:
    """Return a context in which torch.jit.trace records nothing, and sizes are integers rather than tensors."""
    return _paused() if jit_tracing() else nullcontext()


@contextmanager
def _paused() -> Iterator[None]:
    # torch's stubs lack the second of the two.
    inner: Any = torch._C
    state = inner._get_tracing_state()
    inner._set_tracing_state(None)
    try:
        yield
    finally:
        inner._set_tracing_state(state)


# The suffix of operators that are batch invariant wherever they run.
INVARIANT = "_invariant"


def operator(name: str) -> Any:
    """Return the operator of a function's name, with "_into" if the operator writes; or its batch-invariant twin."""
    return getattr(torch.ops.normforge, f"{name}{INVARIANT}" if is_on() else name).default


def operated(function: str, arguments: Mapping[str, Any]) -> Any:
    """Call the operator of a function by named arguments, completed by defaults, and return its results."""
    args = completed(function, arguments)
    return operator(function)(*[args[name] for name in function_named(function).passed])


def operated_as(function: str, call: Call, fields: Sequence[str]) -> list[Any]:
    """Call the operator of a function with what a checked call was given; return the results that `fields` names.

    A field is None if the call does not return such a result.
    """
    outputs = iter(operated(function, args_of(call)))
    return [next(outputs) if name in call.wants else None for name in fields]


def function_traced(family: Family, norm: str, arguments: Mapping[str, Any]) -> Any:
    """Run a call of a function of a norm alone as one operator, given its arguments by name.

    Overlap of outputs is not looked for.
    """
    function = family.functions[Norm(norm)]
    call = check(function, arguments, addressed=False)
    refuse_gradient(call)
    output = NormGradients if call.function.direction is Direction.BACKWARD else LayerNormOutput
    outs = call.function.outs
    if all(call.args[name] is None for name, _ in outs):
        return output(*operated_as(function, call, output._fields))
    args = args_of(call)
    results: dict[str, Any] = {}
    for name, result in outs:
        dtype = call.dtype_of(result)
        out = None if dtype is None else call.x.new_empty(call.x.shape, dtype=dtype)
        results[result] = out if call.args[name] is None else call.args[name]
    outputs = operator(f"{function}_into")(*[args[name] for name in call.function.passed], *results.values())
    others = [name for name in LayerNormOutput._fields if name not in results]
    results |= {name: value if name in call.wants else None for name, value in zip(others, outputs, strict=True)}
    return LayerNormOutput(**results)


def args_of(call: Call) -> dict[str, Any]:
    """Return the arguments of a call as operators take them."""
    args = dict(call.args)
    for name, _, _ in call.function.words:
        args[name] = args[name].value
    if "wants" in args:
        args["wants"] = list(call.wants)
    return args


def result_dtype(norm: str, x: torch.Tensor) -> torch.dtype | None:
    """fp32 where autocast would give torch's operator x in it; None, x's own, anywhere else.

    The kernel reads x as it is, and returns the same numbers.
    """
    return torch.float32 if torch.is_autocast_enabled("cuda") and x.is_cuda and _autocasts(norm) else None


@constant_in_traces
def _autocasts(norm: str) -> bool:
    """Return True if autocast runs torch's operator in fp32 on a GPU; on a CPU no operator does."""
    # Asked of torch, because releases differ: 2.11 does so with layer_norm alone, 2.13 with rms_norm too. Not every
    # norm of ours is an operator of torch's.
    name, has_kernel = f"aten::{norm}_norm", torch._C._dispatch_has_kernel
    return has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")


def becomes_operator(*tensors: torch.Tensor | None) -> bool:
    """Return True if a call runs as an operator: TorchDynamo traces the call, or something sees operators.

    A call under a hook on saved tensors stays recorded. The hook may be checkpoint's, which compares the saved tensors
    of a call with those of its recomputation. Recorded calls save the same tensors whether something sees operators or
    not.
    """
    return is_dynamo_compiling() or (intercepted(*tensors) and saved_tensors_hooks() is None)

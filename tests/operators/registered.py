"""The operators by norm, steps that tests trace, and the calls of operators that a dispatcher mode sees of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import normforge
from normforge.codegen import parameters
from proving.cases import Case, Tensors, gradients

Operator = torch._ops.OpOverload[Any, Any]


def _operator(name: str) -> Operator:
    operator: Operator = getattr(torch.ops.normforge, name).default
    return operator


FORWARD = {norm.value: _operator(name) for norm, name in parameters.FORWARD.functions.items()}
FORWARD_INTO = {norm.value: _operator(f"{name}_into") for norm, name in parameters.FORWARD.functions.items()}
BACKWARD = {norm.value: _operator(name) for norm, name in parameters.BACKWARD.functions.items()}


def by_name(operator: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by their names in its schema."""
    return dict(zip([argument.name for argument in operator._schema.arguments], values, strict=True))


class Seen(TorchDispatchMode):
    """Notes the calls of normforge's operators: each operator with its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares none
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "normforge":
            # Leaves, because a graph that computed an argument may be gone when the call is looked at.
            leaves = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
            self.calls.append((operator, tuple(leaves)))
        return operator(*args, **(kwargs or {}))


def seen(run: Callable[..., Any], *given: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Run a step, and return the calls of operators in it."""
    mode = Seen()
    with mode:
        run(*given)
    assert mode.calls
    return mode.calls


def step(case: Case, given: Tensors) -> list[torch.Tensor]:
    """Return the outputs of a case and their gradients, and that of x in the sum alone if the case stores one."""
    outputs = case.run(given)
    found = [*outputs, *gradients(outputs, given, [output.detach().cos() for output in outputs]).values()]
    if len(outputs) > 1:
        total = case.run(given)[1]
        found += torch.autograd.grad(total, given["x"], total.detach().cos())
    return found


def forward(case: Case, given: Tensors, **options: Any) -> Any:
    """Return what the forward function of a case's family returns."""
    family = "" if case.family == "plain" else f"{case.family}_"
    return getattr(normforge, f"{family}{case['norm']}norm2d_fwd")(**given, **options)

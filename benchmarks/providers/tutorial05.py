"""The kernels of Triton's tutorial 05, where this project began, through the function that the tutorial defines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..cells import Norm, Task
from ..inputs import Inputs
from ..provider import Builder, Prepared, Provider, load, named

_MODULE = "benchmarks.tutorial05"
_GRADIENTS = named("dx", "dweight", "dbias")


def _norm(inputs: Inputs, tensors: tuple[torch.Tensor | None, ...]) -> Callable[[], Any]:
    x, weight, bias = tensors
    return partial(load(_MODULE).layer_norm, x, (inputs.cell.n,), weight, bias, inputs.eps)


def _forward(inputs: Inputs) -> Prepared:
    return Prepared(_norm(inputs, (inputs.x, inputs.weight, inputs.bias)), named("y"))


def _grad_forward(inputs: Inputs) -> Prepared:
    return Prepared(_norm(inputs, inputs.leaves()), named("y"))


def _backward(inputs: Inputs) -> Prepared:
    leaves = inputs.leaves()
    y = _norm(inputs, leaves)()
    return Prepared(lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True), _GRADIENTS)


def _grad_both(inputs: Inputs) -> Prepared:
    leaves = inputs.leaves()
    run = _norm(inputs, leaves)
    return Prepared(lambda: torch.autograd.grad(run(), leaves, inputs.dy), _GRADIENTS)


_BUILDERS: dict[Task, Builder] = {
    Task.FORWARD: _forward,
    Task.GRAD_FORWARD: _grad_forward,
    Task.BACKWARD: _backward,
    Task.GRAD_BOTH: _grad_both,
}

PROVIDERS = (
    Provider(
        "tutorial05",
        "Triton's tutorial",
        (_MODULE,),
        {(task, Norm.LAYER): builder for task, builder in _BUILDERS.items()},
        # Its partial sums are of x's type, and each row adds a rounding: of 4096 rows, about two tolerances.
        allowances={"dweight": 4.0, "dbias": 4.0},
    ),
)

"""The steps from Triton's tutorial to an emitted kernel, timed on the cells of their own suite and no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..cells import Norm, Task
from ..inputs import Inputs
from ..provider import Prepared, Provider, named
from ..steps import backward, forward
from ..suites.steps import GROUPS


def _forward(step: Callable[..., Any], inputs: Inputs) -> Prepared:
    return Prepared(partial(step, inputs.x, inputs.weight, inputs.bias, inputs.eps), named("y"))


def _backward(step: Callable[..., Any], inputs: Inputs) -> Prepared:
    arguments = (inputs.dy, inputs.x, inputs.weight, inputs.mean, inputs.rstd)
    return Prepared(partial(step, *arguments), named("dx", "dweight", "dbias"))


# The titles of the table's columns, in the order of the page.
FORWARD: dict[str, Callable[..., Any]] = {
    "three sweeps": forward.three_sweeps,
    "held": forward.held,
    "pivot": forward.pivoted,
    "exact N": forward.exact,
    "alignment": forward.told,
    "several rows": forward.several_rows,
    "emitted": forward.emitted,
}
BACKWARD: dict[str, Callable[..., Any]] = {
    "locks": backward.locked,
    "partial sums": backward.partial_sums,
    "rows ahead": backward.rows_ahead,
    "emitted": backward.emitted_gradients,
}


def _provider(task: Task, number: int, name: str, step: Callable[..., Any]) -> Provider:
    build = {Task.FORWARD: _forward, Task.BACKWARD: _backward}[task]
    return Provider(
        f"step-{task.value}-{number}",
        f"{number} {name}",
        (forward.__name__,),
        {(task, Norm.LAYER): partial(build, step)},
        groups=GROUPS,
    )


PROVIDERS = tuple(
    _provider(task, number, name, step)
    for task, steps in ((Task.FORWARD, FORWARD), (Task.BACKWARD, BACKWARD))
    for number, (name, step) in enumerate(steps.items(), start=1)
)

"""The interface of a timed peer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .cells import Cell, Norm, Task
from .inputs import Inputs


class Prepared(NamedTuple):
    """One call, ready to be timed.

    Attributes:
        call: what is timed.
        outputs: how to name what it returns, which is not.
        allowance: how many times the oracle's tolerance every output may be off by.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], dict[str, torch.Tensor]]
    allowance: float = 1.0


Builder = Callable[[Inputs], Prepared]
Builders = dict[tuple[Task, Norm], Builder]
# Binds a peer's function to a cell's operands, or to leaves in their place: what is returned is called and timed.
Bind = Callable[[Inputs, Mapping[str, torch.Tensor]], Callable[[], Any]]

# Tasks of plain norms that a function with gradients serves.
RECORDED = (Task.GRAD_FORWARD, Task.GRAD_BOTH)
DIFFERENTIABLE = (Task.FORWARD, Task.BACKWARD, *RECORDED)
_OUTPUTS = {
    **dict.fromkeys((Task.ADD, Task.DROP_ADD, Task.MODULATED, Task.RENORMED, Task.ROTARY), ("y", "residual_out")),
    Task.QUANT: ("y", "y_scale"),
    Task.ADD_QUANT: ("y", "y_scale", "residual_out"),
}


def calls(
    bind: Bind,
    tasks: Iterable[Task],
    norms: Iterable[Norm] = tuple(Norm),
    allowances: Mapping[Task, float] = MappingProxyType({}),
) -> Builders:
    """Return builders of a function's calls: forward, recorded, backward alone, and both.

    Of a backward pass alone only autograd's engine is timed, on a graph that was recorded before and is kept.

    Args:
        bind: binds the function.
        tasks: those that it computes.
        norms: those that it computes.
        allowances: how many times the oracle's tolerance every output of a task may be off by.
    """

    def build(inputs: Inputs) -> Prepared:
        task = inputs.cell.task
        allowance = allowances.get(task, 1.0)
        leaves = inputs.leaves() if task.differentiates or task in RECORDED else inputs.operands()
        run = bind(inputs, leaves)
        if not task.differentiates:
            return Prepared(run, named(*_OUTPUTS.get(task, ("y",))), allowance)
        gradients = named(*(f"d{name}" for name in leaves))
        of, given = tuple(leaves.values()), inputs.of_outputs()
        if task in RECORDED:
            return Prepared(lambda: torch.autograd.grad(run(), of, given), gradients, allowance)
        outputs = run()
        return Prepared(lambda: torch.autograd.grad(outputs, of, given, retain_graph=True), gradients, allowance)

    return dict.fromkeys(product(tasks, norms), build)


def named(*names: str) -> Callable[[Any], dict[str, torch.Tensor]]:
    """Name the tensors that a call returns: alone, as a tuple whose first ones those are, or by name already."""

    def outputs(returned: Any) -> dict[str, torch.Tensor]:
        if hasattr(returned, "_asdict"):
            returned = returned._asdict()
        if isinstance(returned, dict):
            return returned
        values = (returned,) if isinstance(returned, torch.Tensor) else returned
        return dict(zip(names, values, strict=False))

    return outputs


@dataclass(frozen=True)
class Provider:
    """A way of computing cells.

    Attributes:
        name: what `--providers` and the tables call it.
        label: what legends and headings call it.
        modules: imported to see whether the peer is there.
        distribution: the package whose version the header states; empty for one that is stated anyway.
        builders: for a task and a norm, what makes a call of a cell's tensors. What is not in here is not offered.
        library: what is stated beside that version, of a package that calls a library with a version of its own.
        reset: called before each cell.
        compiles: whether its first call in a process may compile.
        groups: of cells that it is for; empty for one that is timed on all that it has a builder for.
        offers: whether it computes such a cell, where a task and a norm do not say it all.
        allowances: how many times the oracle's tolerance an output may be off by, where that is not once.
    """

    name: str
    label: str
    modules: tuple[str, ...]
    builders: Mapping[tuple[Task, Norm], Builder]
    distribution: str = ""
    library: Callable[[], str] | None = None
    reset: Callable[[], None] | None = None
    compiles: bool = True
    groups: tuple[str, ...] = ()
    offers: Callable[[Cell], bool] | None = None
    allowances: Mapping[str, float] = field(default_factory=dict)

    def load(self) -> None:
        """Import the peer.

        Raises:
            Exception: it is not installed, or its own import fails.
        """
        for module in self.modules:
            importlib.import_module(module)

    def version(self) -> str:
        """Return the installed version, or what is known of the provider if there is none."""
        try:
            installed = version(self.distribution)
        except PackageNotFoundError:
            installed = "not stated by its package"
        return installed if self.library is None else f"{installed} ({self.library()})"

    def builder(self, cell: Cell) -> Builder | None:
        """Return what makes a call of the cell's tensors, or None if the peer offers no such call."""
        if self.groups and cell.group not in self.groups:
            return None
        if self.offers is not None and not self.offers(cell):
            return None
        return self.builders.get((cell.task, cell.norm))


def load(module: str) -> Any:
    """Import a peer's module; it has no types that could be relied on, installed or not."""
    return importlib.import_module(module)

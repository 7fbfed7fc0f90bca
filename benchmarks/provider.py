"""The interface of a timed peer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
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


def named(*names: str) -> Callable[[Any], dict[str, torch.Tensor]]:
    """Name the tensors that a call returns, alone or as a tuple whose first ones those are."""

    def outputs(returned: Any) -> dict[str, torch.Tensor]:
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

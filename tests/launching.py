"""What calls launch on a GPU that is not here, by the keys of kernels; a table with other tiles for some rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from normforge.calls import backend, first, plan, road
from normforge.families import rotary, several
from normforge.families.group import row as group
from normforge.kernels import launcher
from normforge.kernels.gpu import KernelKey, Target
from normforge.kernels.launcher import Launcher
from normforge.selection.table import Table
from normforge.upstream import triton_launcher


def noting(met: set[KernelKey]) -> type[Launcher]:
    """Return a class of launchers that add the keys of their kernels to a set; stand-ins for calls have no device."""

    class Noting(Launcher):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if given[-1] is not None:
                met.add(self.key)

    return Noting


@contextmanager
def launching_nothing(target: Target) -> Iterator[set[KernelKey]]:
    """Have calls on the CPU choose kernels of a GPU, of which none is compiled or launched; gives their keys."""
    met: set[KernelKey] = set()
    with ExitStack() as patches:

        def put(place: object, name: str, value: object) -> None:
            patches.enter_context(mock.patch.object(place, name, return_value=value))

        for module in (plan, rotary, several):
            put(module, "target_of", target)
            patches.enter_context(mock.patch.object(module, "Launcher", noting(met)))
        for module in (first, group, road, rotary):
            put(module, "require_device", None)
        put(backend, "_interpreting", True)
        put(launcher, "obtain", None)
        put(triton_launcher, "bind", lambda grid, values: None)
        put(torch.cuda, "device_count", 1)
        yield met


class SomeTable(Table):
    """The same table, with twice the warps for some rows that there are for many."""

    def __init__(self, table: Table) -> None:
        tiles = (
            tuple((arch, replace(of, some=replace(of.large, warps=2 * of.large.warps))) for arch, of in entry.tiles)
            for entry in table
        )
        super().__init__(table.where, map(lambda entry, tiles: replace(entry, tiles=tiles), table, tiles))

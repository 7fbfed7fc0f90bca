"""Cells of GroupNorm: a cell's rows are the groups of all samples, its columns a group's elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .cells import Cell, Norm, Task


@dataclass(frozen=True)
class GroupCell(Cell):
    """GroupNorm of one shape.

    Attributes:
        shape: x's.
        groups: of a sample.
        channels_last: whether channels are innermost.
        silu: whether SiLU follows.
    """

    shape: tuple[int, ...] = ()
    groups: int = 32
    channels_last: bool = False
    silu: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `gn_bf16_silu_last`."""
        words = ("gn", self.dtype, "silu" if self.silu else "", "last" if self.channels_last else "")
        return "_".join(filter(None, words))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape with as many samples as there are rows for."""
        return (max(1, self.m // self.groups), *self.shape[1:])

    @property
    def id(self) -> str:
        """The cell's name, unique within its suite: `group/gn_bf16_silu/2x320x64x64`."""
        return f"{self.task.value}/{self.kind}/{'x'.join(map(str, self.sizes))}"


def cell_of(
    task: Task, shape: tuple[int, ...], *, channels_last: bool, silu: bool, groups: int = 32, dtype: str = "bf16"
) -> GroupCell:
    """Return a cell, in the part of its suite that its task and layout name."""
    m = shape[0] * groups
    part = f"{'backward' if task is Task.GROUP_BACKWARD else 'forward'}{', channels last' if channels_last else ''}"
    options: dict[str, Any] = {"shape": shape, "groups": groups, "channels_last": channels_last, "silu": silu}
    return GroupCell(task, Norm.LAYER, m, math.prod(shape) // m, dtype, group=part, **options)

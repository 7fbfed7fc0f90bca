"""Calls of GroupNorm that a deployment makes, by the shapes of x: what they launch, without tensors or a GPU."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch

from ..calls.plan import Plan
from ..codegen.axes import SAME
from ..codegen.groups import GroupMode
from ..codegen.values import Direction
from ..dtypes import TORCH_DTYPES
from ..errors import ConflictError, ShapeError
from ..families.group.row import call_in_memory, slots_of
from ..kernels.assembly import SUMS
from ..kernels.gpu import Target
from ..kernels.launcher import Launcher
from ..selection.table import Entry
from .stand_ins import FEW, MANY, MOST, ROWS, SOME, Deployment
from .stand_ins import Kind as Asked

_WRITTEN = re.compile(r"(\*|[1-9]\d*)((?:x[1-9]\d*)+)/([1-9]\d*)")


@dataclass(frozen=True)
class GroupShape:
    """A shape of x, and its groups.

    Attributes:
        samples: how many there are; None is any number.
        channels: of x.
        space: the sizes of what follows: none of (B, C).
        groups: of a sample.
    """

    samples: int | None
    channels: int
    space: tuple[int, ...]
    groups: int

    @classmethod
    def parse(cls, text: object) -> GroupShape:
        """Parse a shape such as 2x320x64x64/32, or *x320x64x64/32 for any number of samples.

        Raises:
            ShapeError: it is written otherwise, or the groups do not divide the channels.
        """
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ShapeError(
                f"shapes has {text!r}; it takes x's shape and how many groups a sample has, '2x320x64x64/32' say, or "
                "'*x320x64x64/32' for any number of samples"
            )
        samples, sizes, groups = found[1], [int(size) for size in found[2][1:].split("x")], int(found[3])
        if sizes[0] % groups:
            raise ShapeError(f"shapes has {text!r}, and {groups} groups do not divide {sizes[0]} channels")
        return cls(None if samples == "*" else int(samples), sizes[0], tuple(sizes[1:]), groups)

    def __str__(self) -> str:
        sizes = "x".join(map(str, ("*" if self.samples is None else self.samples, self.channels, *self.space)))
        return f"{sizes}/{self.groups}"

    @property
    def positions(self) -> int:
        """The number of positions of a channel."""
        return prod(self.space)

    @property
    def n(self) -> int:
        """How many elements a group has."""
        return self.channels // self.groups * self.positions

    def batches(self, entry: Entry, asked: Collection[str]) -> dict[str, int]:
        """A number of samples for each class of so many groups that is asked for and can be.

        Raises:
            ConflictError: there is none.
        """
        found = samples_of(entry, self.groups)
        if self.samples is not None:
            found = {ROWS[entry.size(self.samples * self.groups)]: self.samples}
        taken = {word: found[word] for word in asked if word in found}
        if not taken:
            raise ConflictError(
                f"shapes has {str(self)!r}, whose groups in all samples are {' or '.join(found)} ({FEW} is up to "
                f"{entry.small_m}, {SOME} up to {entry.some_m}), and rows has {', '.join(asked)} alone; add "
                f"{next(iter(found))!r} to it"
            )
        return taken


def samples_of(entry: Entry, groups: int) -> dict[str, int]:
    """The fewest samples of so many groups for each class of M that there are; more than many take many's kernels."""
    found = {word: m // groups for word, m in entry.least_rows(groups).items()}
    return found | {MOST: found.get(MANY, 1)}


def fitting(modes: Collection[GroupMode], shapes: Iterable[GroupShape]) -> Iterator[tuple[GroupMode, GroupShape]]:
    """Each shape with the modes that calls of it have.

    Raises:
        ConflictError: there are none of a shape.
    """
    for shape in shapes:
        found = [mode for mode in modes if mode.takes(shape.channels, shape.space)]
        if not found:
            other = "without channels_last" if shape.space else "of channels_last"
            raise ConflictError(
                f"shapes has {str(shape)!r}, and modes has {', '.join(mode.name for mode in modes)}; such an x lies as "
                f"modes {other} have it: name one of those"
            )
        yield from ((mode, shape) for mode in found)


def launches(
    mode: GroupMode, shape: GroupShape, target: Target, deployment: Deployment, *, trained: bool
) -> Iterator[tuple[str, str, Launcher]]:
    """Yield what calls of a mode launch: the instance, the class of the number of groups, and a launcher.

    Args:
        mode: theirs.
        shape: of their x.
        target: the GPU.
        deployment: what else they bring.
        trained: whether some of a forward mode save statistics, for a backward pass.
    """
    for plan in _plans(mode, shape, target, deployment, trained=trained):
        for word, samples in shape.batches(plan.entry, deployment.rows).items():
            for launcher in plan.prepared(samples * shape.groups).launchers:
                yield plan.entry.name, word, launcher


def _plans(
    mode: GroupMode, shape: GroupShape, target: Target, deployment: Deployment, *, trained: bool
) -> Iterator[Plan]:
    """Yield a plan for each combination of what calls may bring."""
    size, own = (shape.channels, shape.groups, shape.positions), TORCH_DTYPES[mode.dtype_in]

    def dtype(kind: Asked) -> torch.dtype | None:
        return own if kind == SAME else kind if isinstance(kind, torch.dtype) else None

    def plan(dtypes: Mapping[str, torch.dtype | None], names: Collection[str], due: dict[str, torch.dtype]) -> Plan:
        there = {name: kind for name, kind in dtypes.items() if kind is not None}
        tensors = {name: torch.empty(0, dtype=kind, device="cpu") for name, kind in there.items()}
        call = call_in_memory(mode, size, tensors, due)
        return Plan(call, slots_of(call, names), target)

    for weight, names in product(map(dtype, deployment.weight_dtypes), deployment.misaligned):
        for bias in [weight] if deployment.bias_dtypes is None else map(dtype, deployment.bias_dtypes):
            dtypes = {"x": own, "weight": weight, "bias": bias}
            if mode.is_backward:
                vectors = {"dweight": weight, "dbias": bias}
                for dy, wants in product(map(dtype, deployment.dy_dtypes), deployment.wants or (("dx", *SUMS),)):
                    due = {name: kind for name, kind in vectors.items() if kind is not None and name in wants}
                    if due or "dx" in wants:
                        yield plan({"dy": dy, **dtypes}, names, {"dx": own, **due})
                continue
            for y, saves in product(map(dtype, deployment.y_dtypes), (False, True) if trained else (False,)):
                assert y is not None
                saved = dict.fromkeys(("mean", "rstd") if saves else (), torch.float32)
                yield plan(dtypes, names, {"y": y, **saved})


def trained(modes: Iterable[GroupMode]) -> frozenset[GroupMode]:
    """The forward modes of the backward ones among some."""
    return frozenset(replace(mode, direction=Direction.FORWARD) for mode in modes if mode.is_backward)

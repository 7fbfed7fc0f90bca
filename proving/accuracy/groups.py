"""GroupNorm, measured: each row of a kind is a group, its channels and positions side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, product

import torch
from torch.nn import functional

from normforge.codegen import prose
from normforge.codegen.groups import GroupMode, group_modes
from normforge.codegen.instance import Tile
from normforge.codegen.values import Part, Pipeline
from normforge.families.group import row as group
from normforge.families.operands import GroupArrived, GroupNormGradients, GroupOptions
from normforge.kernels.gpu import named_target
from normforge.kernels.group_tiles import Shape, choose, cut
from normforge.reference.grouped import group_norm_bwd

from .listed import modes_of, tiles_of
from .peer import EPS
from .units import Exact, median, statistics

# Of a sample; rows of a kind come in multiples of it.
GROUPS = 4
_aten = torch.ops.aten


class Layout(Enum):
    """How rows lie in memory; the value is what names and reports call it."""

    ADJOINING = ""
    HEADS = "heads"
    HEADS_IN_PLACE = "heads in place"


@dataclass(frozen=True)
class GroupCase:
    """One launch to measure; n is how many elements a group has."""

    mode: GroupMode
    n: int
    tile: Tile
    layout: Layout = Layout.ADJOINING

    @property
    def name(self) -> str:
        """For messages: the mode, N and the tile."""
        return f"{self.mode.name} N={self.n} {' '.join(str(value) for value in self.tile.row)}"

    @property
    def dtypes(self) -> str:
        """X's type, and what else there is, in words."""
        return ", ".join((self.mode.dtype_in.value, *prose.features(self.mode)))

    @property
    def channels(self) -> int:
        """The number of channels per group."""
        return next(channels for channels in (8, 4, 2, 1) if self.n % channels == 0)

    @property
    def shape(self) -> Shape:
        """The shape of x that tiles depend on."""
        return Shape(GROUPS * self.channels, GROUPS, self.n // self.channels, self.mode.dtype_in.itemsize)

    @property
    def parts(self) -> tuple[Pipeline | Part, ...]:
        """The kernels that run: where a tile gives a program whole groups, no other kernel prepares the last one."""
        parts = self.mode.parts(self.tile.pipeline)
        return parts[-1:] if cut(self.mode, self.shape, self.tile).parts == 1 else parts

    def shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """(M, N) rows as x: (samples, channels, positions)."""
        x = rows.view(-1, GROUPS * self.channels, self.n // self.channels)
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if self.mode.channels_last else x

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """X's shape back to (M, N)."""
        return x.reshape(-1, self.n)

    @property
    def options(self) -> GroupOptions:
        """Return the options of calls."""
        return GroupOptions(GROUPS, EPS, self.mode.activation.value, None)


Found = tuple[str, torch.dtype, Exact, torch.Tensor, torch.Tensor]


def forward(case: GroupCase, rows: torch.Tensor, weight: torch.Tensor) -> Iterator[Found]:
    """Each output: its name and type, what is exact, ours and torch's."""
    x, silu = case.shaped(rows), case.mode.activation.is_applied
    ours, saved = group.launched(x, weight, None, case.options, saves=True)
    assert saved is not None
    s = rows.double()
    mean, rstd = statistics(s, EPS)
    z = case.rows(case.shaped((s - mean) * rstd) * weight.double().view(-1, 1))
    y = functional.silu(z) if silu else z
    size = x.shape[0], x.shape[1], x.shape[2]
    plain = x.contiguous()
    theirs, *_ = _aten.native_group_norm(
        plain.float() if silu else plain, weight.float() if silu else weight, None, *size, GROUPS, EPS
    )
    theirs = functional.silu(theirs).to(x.dtype) if silu else theirs
    _, their_mean, their_rstd = _aten.native_group_norm(plain.float(), weight.float(), None, *size, GROUPS, EPS)
    yield "y", ours.dtype, Exact(y, median(y)), case.rows(ours), case.rows(theirs)
    yield "mean", torch.float32, Exact(mean[:, 0], s.abs().mean(-1)), saved[0].flatten(), their_mean.flatten()
    zero = torch.zeros_like(rstd[:, 0])
    yield "rstd", torch.float32, Exact(rstd[:, 0], zero), saved[1].flatten(), their_rstd.flatten()


def backward(case: GroupCase, rows: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor) -> Iterator[Found]:
    """Return each gradient; ours from fp64's statistics in fp32."""
    x, given, silu = case.shaped(rows), case.shaped(dy), case.mode.activation.is_applied
    bias = torch.zeros_like(weight)
    saved = torch.stack(statistics(rows, EPS)).float().view(2, x.shape[0], GROUPS)
    ours = group.launched_backward(
        GroupArrived(given, x, weight, bias, saved, case.options, GroupNormGradients._fields)
    )
    activation = "silu" if silu else None
    exact = group_norm_bwd(given, x, GROUPS, weight, bias, EPS, activation=activation)
    leaves = tuple(tensor.detach().contiguous().float().requires_grad_() for tensor in (x, weight, bias))
    z = functional.group_norm(leaves[0], GROUPS, leaves[1], leaves[2], EPS)
    theirs = torch.autograd.grad(functional.silu(z) if silu else z, leaves, given.float())
    for name, our, their in zip(GroupNormGradients._fields, ours, theirs, strict=True):
        assert our is not None
        want = Exact(getattr(exact, name), exact.magnitudes[name])
        yield name, our.dtype, want, our, their.to(x.dtype)


MODES = modes_of("groups", ("gn",), {mode.name: mode for mode in group_modes()}.__getitem__)


def group_cases(compiles: bool) -> Iterator[GroupCase]:
    """Every mode with every tile that there is a kernel for and that its groups fit."""
    target = named_target("sm_90")
    some = tiles_of("compiled" if compiles else "interpreted", "groups")
    for mode, (tile, lengths) in product(chain(*MODES.values()), some):
        if tile.pipeline not in mode.pipelines or (tile.pipeline is Pipeline.SPREAD and mode.dtype_in.itemsize > 2):
            continue
        for n in lengths:
            case = GroupCase(mode, n, tile)
            if choose(mode, case.shape, (tile,), target)[0] == tile:
                yield case

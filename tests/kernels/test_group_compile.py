"""Kernels of GroupNorm and norms over channels for GPUs that need not be here: each is compiled, and none spills."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any

import pytest
import torch

from normforge.calls.plan import Plan
from normforge.codegen.groups import GroupMode, group_modes
from normforge.codegen.instance import Tile
from normforge.codegen.parameters import family_of
from normforge.codegen.values import Part, Pipeline
from normforge.dtypes import TORCH_DTYPES
from normforge.families.group.row import call_in_memory, slots_of
from normforge.kernels.gpu import named_target
from normforge.kernels.obtain import compile_for
from normforge.selection import dispatch, on_demand
from normforge.selection.table import RetiledTable

from ..covering import few_first
from ..thorough import COSTLY, first_of_each

pytestmark = pytest.mark.compile

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
TILES = {
    Pipeline.ONE_PASS: Tile(Pipeline.ONE_PASS, 1, 2048, 8),
    Pipeline.TWO_PASS: Tile(Pipeline.TWO_PASS, 1, 2048, 8, held=2),
}
CHANNELS, GROUPS, POSITIONS = 320, 32, 256

CASES = [
    (mode, pipeline, arch)
    for mode in group_modes()
    if mode.span.is_group
    for pipeline in mode.pipelines
    for arch in ARCHITECTURES
]


def compiled(
    mode: GroupMode, sizes: tuple[int, int, int], m: int, arch: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the texts of each kernel but the finisher, for tensors of x's dtype, all of them present."""
    own, family, target = TORCH_DTYPES[mode.dtype_in], family_of(mode), named_target(arch)
    tensors = {row.name: torch.empty(0, dtype=own, device="cpu") for row in family.inputs}
    dtypes = {row.name: torch.float32 if row.name in ("mean", "rstd") else own for row in family.results}
    call = call_in_memory(mode, sizes, tensors, dtypes)
    ready = Plan(call, slots_of(call, ()), target).prepared(m)
    for launcher in ready.launchers[: len(ready.assembly.walkers)]:
        asm = compile_for(launcher.key, launcher.kernel, target).asm
        assert ".local " not in asm.get("ptx", "")
        yield launcher.key.symbol, asm


def _tiles_that_change_threads(text: str, *, in_loop: bool) -> list[str]:
    """Tiles that go through shared memory to other threads: the statistics did, spread over a tile by all of them.

    Where a program takes tiles in turn, what it does once, ahead of that, is not looked at: channels-last fp32 moves
    three there.
    """
    if in_loop:
        text = text.partition("scf.for")[2]
    moved = re.findall(r"convert_layout .* : tensor<((?:\d+x)+)", text)
    return [shape for shape in moved if math.prod(map(int, shape.split("x")[:-1])) >= 1024]


@COSTLY
@pytest.mark.parametrize(
    "case",
    first_of_each(
        CASES,
        lambda case: (
            (case[0].direction, case[0].channels_last, case[1], case[2] == "gfx942")
            if case[0].activation.is_applied and case[0].dtype_in.value == "bf16" and case[2] in ("sm_90", "gfx942")
            else None
        ),
        lambda case: f"{case[0].kernel(case[1])}-{case[2]}",
    ),
)
def test_kernels_compile(case: tuple[GroupMode, Pipeline, str]) -> None:
    mode, pipeline, arch = case
    n = CHANNELS // GROUPS * POSITIONS
    with dispatch.using(RetiledTable(dispatch.loaded(), on_demand.generate(mode, n, "a test"), TILES[pipeline])):
        found = dict(compiled(mode, (CHANNELS, GROUPS, POSITIONS), 2 * GROUPS, arch))
        assert mode.kernel(pipeline) in found
        for name, asm in found.items():
            in_loop = pipeline is Pipeline.TWO_PASS and "scf.for" in asm["ttgir"]
            assert not _tiles_that_change_threads(asm["ttgir"], in_loop=in_loop)
            reads = "ptx" in asm and name != mode.kernel(Part.MERGE)
            assert not reads or "ld.global.v4" in asm["ptx"] or "cp.async" in asm["ptx"]


# Channels and positions: chunks of channels in registers, positions that a shorter vector or none divides, and channels
# that are read twice.
_CHANNELS = ((96, 3136), (384, 196), (768, 49), (4096, 64))
CHANNEL_CASES = [
    (mode, size, arch)
    for mode in group_modes()
    if not mode.span.is_group
    for size in _CHANNELS
    for arch in ARCHITECTURES
]


@pytest.mark.parametrize(
    "case",
    few_first(
        CHANNEL_CASES,
        lambda case: (*astuple(case[0]), (case[0].direction, case[1]), case[2]),
        lambda case: f"{case[0].name}-{case[1][0]}x{case[1][1]}-{case[2]}",
    ),
)
def test_norms_over_channels_compile(case: tuple[GroupMode, tuple[int, int], str]) -> None:
    mode, (channels, positions), arch = case
    # As many neighbouring positions at once as divide the image, up to 16 bytes.
    words = min(16, math.gcd(channels if mode.channels_last else positions, 8) * mode.dtype_in.itemsize) // 4
    for _, asm in compiled(mode, (channels, 1, positions), 8, arch):
        assert not _tiles_that_change_threads(asm["ttgir"], in_loop=mode.is_backward)
        assert words < 2 or "ptx" not in asm or re.search(rf"ld\.global\S*\.v{words}\.b32", asm["ptx"])

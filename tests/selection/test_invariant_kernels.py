"""Under batch invariance the kernel of a call follows from its mode, its types and N alone: this holds it with no GPU.

How a row is added up is settled by what a kernel is compiled from: its pipeline, tile and constants, and what Triton is
told of addresses. So all calls of a mode and N have to come to one compilation, whatever M is and wherever rows lie.
Row strides alone may be of another type: one number or, of heads, a tuple, from which addresses are made.
"""

import random
from typing import Any

import pytest

import normforge
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, Pipeline
from normforge.errors import InvarianceError
from normforge.selection import dispatch
from normforge.selection.table import RetiledTable

from ..covering import modes_of_one_gpu
from ..kernels.compile_cases import SPREAD_TILES
from ..thorough import THOROUGH

# Read while no test has generated others.
COMMITTED = sorted({entry.mode for entry in normforge.instances()})
ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")
# Each bucket's neighbourhood: whole vectors, pairs, odd ones, and rows that other tables spread.
NS = (1, 7, 64, 100, 127, 128, 129, 1000, 1023, 4096, 4097, 4100, 5120, 8191, 16384, 40000, 70001, 140000)

each_arch = pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[] if arch == "sm_90" else THOROUGH) for arch in ARCHES]
)


def compilations(mode: Mode, n: int, arch: str, **lying: Any) -> list[str]:
    """What the kernels of calls are compiled from, as text, but for the types of row strides."""
    keys = [each.key for each in normforge.compile_keys([n], [mode], arch=arch, **lying)]
    arguments = [[pair for pair in key.arguments if not pair[0].endswith("row_stride")] for key in keys]
    return [str((key.kernel, own, key.options)) for key, own in zip(keys, arguments, strict=True)]


def places(n: int) -> list[dict[str, Any]]:
    """Numbers of rows, and ways in which they lie."""
    return [
        *({"rows": [word]} for word in ("few", "some", "many")),
        {"rows": ["many"], "misaligned": [("x",)]},
        *({"rows": ["few"], "row_strides": [stride]} for stride in (n + 1, n + 8, n + 12, n + 16)),
        {"rows": ["few"], "row_strides": [n + 3], "misaligned": [("x",)]},
    ]


@each_arch
def test_any_mode_has_one_kernel_for_every_m_and_place(arch: str) -> None:
    """Of plain, gated, grouped, modulated and served norms, backward as forward, some of each and of their N."""
    pick = random.Random(f"any {arch}")
    # Modes behind an exchange are compiled for a number of ranks, from recordings alone.
    legal = modes_of_one_gpu()
    shared = [mode for mode in legal if mode.shares or mode.modulated or mode.gating.gates]
    backward = [mode for mode in shared if mode.is_backward]
    # Backward passes that round rows first are for a dy of 16 bits, and are listed with its type alone.
    served = [mode for mode in legal if mode.serves and not (mode.is_backward and mode.cast.comes_first)]
    own = [Mode.from_name(name) for name in COMMITTED]
    for modes, many in ((own, 8), (shared, 4), (backward, 2), (served, 4)):
        for mode in pick.sample(modes, many):
            for n in pick.sample([n for n in NS if n % mode.dtype_out.packs == 0], 2):
                with normforge.batch_invariant():
                    found = [compilations(mode, n, arch, **lying) for lying in places(n)]
                assert all(each == found[0] for each in found), (mode.name, n)


@pytest.mark.parametrize("arch", ARCHES)
def test_no_tile_for_every_m_spreads_rows(arch: str) -> None:
    """Every instance has one on every architecture, and no team shares a row with it."""
    for entry in normforge.instances():
        (invariant,) = entry.invariant.tiles_on(arch).every
        assert invariant.pipeline is not Pipeline.SPREAD
        assert entry.invariant.choices(1, entry.first, arch) == entry.invariant.choices(1 << 20, entry.first, arch)


def test_a_tile_that_spreads_rows_is_refused() -> None:
    """Of a folder that an older normforge made, say: its rows have no tile of their own for every M."""
    mode = Mode.from_name("rms_fwd_bf16")
    table = RetiledTable(dispatch.loaded(), dispatch.find(mode, 70000), SPREAD_TILES[Direction.FORWARD])
    with dispatch.using(table), normforge.batch_invariant(), pytest.raises(InvarianceError, match="spread") as raised:
        compilations(mode, 70000, "sm_90")
    assert "generate the folder anew" in str(raised.value)


def test_more_rows_than_kernels_count_are_refused() -> None:
    """Kernels that count in 64 bits are others; half a batch has the same bits."""
    mode = Mode.from_name("rms_fwd_bf16")
    with normforge.batch_invariant(), pytest.raises(InvarianceError, match="split the batch"):
        compilations(mode, 64, "sm_90", rows=["most"])

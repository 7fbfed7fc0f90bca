"""Under batch invariance the kernel of a call follows from its mode, its types and N alone: this holds it with no GPU.

How a row is added up is settled by what a kernel is compiled from: its pipeline, tile and constants, and what Triton is
told of addresses. So all calls of a mode and N have to come to one compilation, whatever M is and wherever rows lie.
Row strides alone may be of another type: one number or, of heads, a tuple, from which addresses are made.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import normforge
from normforge.call_kinds import MOST_ROWS_IN_I32
from normforge.calls.check import Call, check
from normforge.calls.first import address_of, settled
from normforge.calls.known import MISALIGNED
from normforge.calls.plan import Plan
from normforge.codegen.families import Family, Kind
from normforge.codegen.legal import legal_modes
from normforge.codegen.model import Mode
from normforge.codegen.parameters import family_of
from normforge.codegen.values import Direction, Pipeline
from normforge.dtypes import TORCH_DTYPES
from normforge.errors import InvarianceError
from normforge.kernels.gpu import ARCHITECTURES, Target
from normforge.selection import dispatch
from normforge.selection.table import RetiledTable

from ..thorough import THOROUGH

ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")
# Around SMALL_M, and up to rows of many programs.
MS = (1, 2, 3, 7, 255, 256, 257, 1000, 4096)
# Each bucket's neighbourhood: whole vectors, pairs, odd ones, and rows that other tables spread.
NS = (1, 7, 64, 100, 127, 128, 129, 1000, 1023, 4096, 4097, 4100, 5120, 8191, 16384, 40000, 70001, 140000)

MODES = sorted({entry.mode for entry in normforge.instances()})

# Elements between rows beside N, and from an aligned address to the first row.
LAYOUTS = ((0, 0), (0, 1), (0, 8), (1, 0), (8, 0), (12, 0), (16, 0), (3, 5))


def laid_out(m: int, n: int, dtype: torch.dtype, beside: int, ahead: int) -> torch.Tensor:
    """Rows of nothing: of memory that is never touched, however much it is."""
    return torch.empty(m * (n + beside) + ahead, dtype=dtype)[ahead:].view(m, n + beside)[:, :n]


def call_of(mode: Mode, m: int, n: int, beside: int = 0, ahead: int = 0) -> tuple[Call, Family]:
    """A call of a mode whose rows all lie in one way."""
    family = family_of(mode)
    takes = family.functions[mode.norm]
    own = TORCH_DTYPES[mode.operand_dtype]
    given: dict[str, Any] = {}
    for row in family.inputs:
        if not row.is_wanted(mode):
            continue
        if row.kind is Kind.ROWS:
            dtype = TORCH_DTYPES[mode.dtype_in] if row.name == "x" else own
            given[row.name] = laid_out(m, n, dtype, beside, ahead)
        elif row.kind is Kind.VECTOR:
            given[row.name] = torch.empty(n, dtype=torch.float32 if row.name == "smooth_scale" else own)
        elif row.kind in (Kind.PER_ROW, Kind.SCALE):
            given[row.name] = torch.empty(m + ahead)[ahead:]
        elif row.kind is Kind.RANDOM:
            given[row.name] = torch.empty(2, dtype=torch.int64)
    if mode.direction is Direction.BACKWARD:
        given["wants"] = [name for name in ("dx", "dweight", "dbias", "dx_bias", "ddropped") if fits(name, mode)]
        given["bias_dtype"] = own if mode.norm.centres else None
    else:
        given |= {"fadd": mode.fadd, "fquant": mode.fquant, "save_mv": mode.save_mv, "rounding": mode.rounding}
        given["out"] = laid_out(m, n, TORCH_DTYPES[mode.dtype_out], beside, ahead)
        if mode.fadd.stores:
            given["residual_out"] = laid_out(m, n, own, beside, ahead)
    if mode.dropout:
        given["dropout_p"] = 0.5
    given["cast"] = mode.cast
    named = {row.name for row in family.of(mode.norm)}
    return check(takes, {name: value for name, value in given.items() if name in named}), family


def fits(gradient: str, mode: Mode) -> bool:
    own = {"dbias": mode.norm.centres, "dx_bias": mode.x_bias, "ddropped": mode.dropout}
    return own.get(gradient, True)


def compiled(call: Call, family: Family, target: Target) -> list[str]:
    """What the kernels of a call are compiled from, as text, but for the types of row strides."""
    operands = (*family.inputs, *family.outs)
    call = settled(call)
    tensors = [(row, getattr(call, row.name, None)) for row in operands]
    misaligned = [row.slot for row, tensor in tensors if address_of(row.name, tensor) & MISALIGNED]
    keys = [launcher.key for launcher in Plan(call, misaligned, target).prepared(call.m).launchers]
    for key in keys:
        told = dict(key.arguments)
        for row, tensor in tensors:
            # What a kernel is told of addresses has to hold of those that it is brought.
            if tensor is not None and str(told.get(row.slot)).endswith(":16"):
                assert tensor.data_ptr() % 16 == 0, (row.name, key)
            if tensor is not None and row.kind.has_row_stride and row.row_stride_slot in told:
                assert call.m == 1 or tensor.stride(0) % int(str(told["ROW_ALIGNMENT"])) == 0, (row.name, key)
    return [
        str((key.kernel, [pair for pair in key.arguments if not pair[0].endswith("row_stride")], key.options))
        for key in keys
    ]


def layouts(n: int) -> Iterator[tuple[int, int]]:
    # What lies beside a row takes memory, whether or not it is touched: copies of the longest are.
    yield from LAYOUTS if n <= 8192 else LAYOUTS[:2]


each_arch = pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[] if arch == "sm_90" else THOROUGH) for arch in ARCHES]
)


@each_arch
def test_a_mode_and_n_have_one_kernel_for_every_m_and_place(arch: str) -> None:
    """Of each architecture a sample of modes and N, and of each of those every M and way to lie in memory."""
    target, pick = ARCHITECTURES[arch], random.Random(arch)
    with normforge.batch_invariant():
        for name in pick.sample(MODES, 12):
            mode = Mode.from_name(name)
            for n in (100, *pick.sample(NS, 3)):
                found = {}
                for m in MS:
                    if m * n <= 1 << 26:
                        found[m, 0, 0] = compiled(*call_of(mode, m, n), target)
                for beside, ahead in layouts(n):
                    found[3, beside, ahead] = compiled(*call_of(mode, 3, n, beside, ahead), target)
                first = next(iter(found.values()))
                assert all(each == first for each in found.values()), (name, n, found)


@pytest.mark.parametrize("arch", ARCHES)
def test_no_tile_for_every_m_spreads_rows(arch: str) -> None:
    """Every instance has one on every architecture, and no team shares a row with it."""
    for entry in normforge.instances():
        (invariant,) = entry.invariant.tiles_on(arch).every
        assert invariant.pipeline is not Pipeline.SPREAD
        assert entry.invariant.choices(1, entry.first, arch) == entry.invariant.choices(1 << 20, entry.first, arch)


@each_arch
def test_any_mode_has_one_kernel(arch: str) -> None:
    """Of gated, grouped, modulated and served norms, backward as forward, whose kernels are made ready by others."""
    pick = random.Random(f"any {arch}")
    legal = [*legal_modes()]
    shared = [mode for mode in legal if mode.shares or mode.modulated or mode.gating.gates]
    served = [mode for mode in legal if mode.serves]
    backward = [mode for mode in shared if mode.is_backward]
    for mode in (*pick.sample(shared, 4), *pick.sample(backward, 2), *pick.sample(served, 4)):
        for n in pick.sample([n for n in NS if n % mode.dtype_out.packs == 0], 2):
            with normforge.batch_invariant():
                keys = [
                    [key.key for key in normforge.compile_keys([n], [mode], arch=arch, rows=[word], misaligned=[names])]
                    for word, names in (("few", ()), ("some", ()), ("many", ()), ("many", ("x",)))
                ]
            assert all(each == keys[0] for each in keys), (mode.name, n)
            by_m = [normforge.compile_keys([n], [mode], arch=arch, misaligned=[names]) for names in ((), ("x",))]
            assert by_m[0] != by_m[1]


@pytest.mark.parametrize("n", [4096, 4097, 96])
def test_without_it_kernels_follow_m_and_place(n: int) -> None:
    """Which is what the test above is able to see."""
    target, mode = ARCHITECTURES["sm_90"], Mode.from_name("ln_fwd_bf16")
    texts = {
        str(compiled(*call_of(mode, m, n, beside, ahead), target))
        for m, beside, ahead in ((1, 0, 0), (3000, 0, 0), (3, 1, 0), (3, 0, 1))
    }
    assert len(texts) > 1


def test_a_tile_that_spreads_rows_is_refused() -> None:
    """Of a folder that an older normforge made, say: its rows have no tile of their own for every M."""
    mode = Mode.from_name("rms_fwd_bf16")
    spread = next(
        tile
        for entry in normforge.instances()
        if entry.mode == mode.name
        for tile in entry.tiles_on("sm_90").every
        if tile.pipeline is Pipeline.SPREAD
    )
    table = RetiledTable(dispatch.loaded(), dispatch.find(mode, 70000), spread)
    with dispatch.using(table), normforge.batch_invariant(), pytest.raises(InvarianceError, match="spread") as raised:
        compiled(*call_of(mode, 3, 70000), ARCHITECTURES["sm_90"])
    assert "generate the folder anew" in str(raised.value)


def test_more_rows_than_kernels_count_are_refused() -> None:
    """Kernels that count in 64 bits are others; half a batch has the same bits."""
    mode = Mode.from_name("rms_fwd_bf16")
    with normforge.batch_invariant():
        call, _ = call_of(mode, 1, 64)
        plan = Plan(call, [], ARCHITECTURES["sm_90"])
        plan.prepared(MOST_ROWS_IN_I32)
        with pytest.raises(InvarianceError, match="split the batch"):
            plan.prepared(MOST_ROWS_IN_I32 + 1)

"""Which kernels calls of a kind take: by how operands are aligned, and by how many rows there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.codegen.model import Mode
from normforge.codegen.tiling import SMALL_M
from normforge.codegen.values import DType, Norm
from normforge.families.public import layernorm2d_bwd
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch
from normforge.selection.table import Table, entries_of

pytestmark = pytest.mark.usefixtures("nothing_known")

M, N = 3, 64
# Bytes from a multiple of 16 to where a misaligned tensor starts, a multiple of every element's size.
SHIFT = 8


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launcher]:
    """Every launcher that a call has launched."""
    launchers: list[Launcher] = []
    usual = Launcher.launch_tensors

    def launch(launcher: Launcher, grid: Any, values: Any) -> None:
        launchers.append(launcher)
        usual(launcher, grid, values)

    monkeypatch.setattr(Launcher, "launch_tensors", launch)
    return launchers


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts at no multiple of 16 bytes."""
    shift = SHIFT // tensor.element_size()
    memory = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)
    assert memory.data_ptr() % 16 == 0
    return memory[shift:].view(tensor.shape).copy_(tensor)


def test_the_compiler_is_told_which_operands_lie_at_multiples_of_16_bytes(launched: list[Launcher]) -> None:
    usual = {"x": torch.randn(M, N), "weight": torch.randn(N)}
    for name in (*usual, None):
        given: dict[str, Any] = {each: misaligned(tensor) if each == name else tensor for each, tensor in usual.items()}
        normforge.rmsnorm2d_fwd(**given)
        told = dict(launched[-1].key.arguments)
        assert {each: told[f"{each}_ptr"] == "*fp32:16" for each in given} == {each: each != name for each in given}


# For at most 6 rows another kernel than for more, and for at most 12 a third where a table has it; M, and warps.
MANY, FEW, SOME = [("rows", 4, N, warps) for warps in (1, 2, 4)]
TILES: dict[str, tuple[tuple[Any, ...], dict[int, int]]] = {
    "few": ((MANY, FEW), {6: 2, 7: 1, 1: 2, 30: 1}),
    "some": ((MANY, FEW, MANY, SOME), {6: 2, 7: 4, 12: 4, 13: 1, 1: 2}),
}


@pytest.mark.parametrize(("tiles", "warps"), TILES.values(), ids=TILES)
@pytest.mark.parametrize("mode", ["ln_fwd_fp32", "ln_bwd_fp32"])
def test_as_many_rows_as_a_table_calls_few_take_its_kernel_for_few(
    mode: str, tiles: tuple[Any, ...], warps: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And some rows that for some, whichever direction."""
    taken: list[int] = []
    monkeypatch.setattr(
        Launcher, "launch_tensors", lambda launcher, *_: taken.append(dict(launcher.key.options)["num_warps"])
    )
    table = Table("a test", entries_of("normforge.generated", {mode: {"any": ((1, N, "n64", *tiles),)}}, 6, 12))
    with dispatch.using(table):
        for m in warps:
            x = torch.randn(m, N)
            if mode == "ln_fwd_fp32":
                normforge.layernorm2d_fwd(x)
            else:
                layernorm2d_bwd(x, x, mean=torch.zeros(m), rstd=torch.ones(m))
    assert taken == [*warps.values()]


def test_the_table_calls_as_many_rows_few_as_tiles_were_chosen_for() -> None:
    """Up to SMALL_M rows: `normforge tune` times the tile for a few up to there, and the rule's is made for those."""
    entry = dispatch.find(Mode(Norm.LAYER, DType.FP32, DType.FP32), N)
    small, _, large = entry.tiles_on("any").by_rows
    assert large != small
    assert [entry.tile(m, 128, "any") for m in (SMALL_M, SMALL_M + 1)] == [small, large]

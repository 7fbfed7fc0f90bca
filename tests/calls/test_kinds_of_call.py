"""A call that differs from one before in an operand's type, layout or alignment is of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen.model import Mode
from normforge.codegen.tiling import SMALL_M
from normforge.codegen.values import DType, Norm
from normforge.families.public import layernorm2d_bwd
from normforge.kernels.key import pointer_type
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch
from normforge.selection.table import Table, entries_of
from proving.cases import LAYOUTS

from ..calling import FORWARD, ORACLE, agree, each_norm
from .shared import backward_operands, check_backward, there

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


VECTORS = ("weight", "bias", "x_bias", "smooth_scale")
ROWS = ("x", "residual", "out", "residual_out")


def fused(norm: str) -> dict[str, Any]:
    """Arguments of a call that has every operand there is."""
    given: dict[str, Any] = {name: torch.randn(M, N) for name in ("x", "residual")}
    given |= {"out": torch.zeros(M, N, dtype=torch.int8), "residual_out": torch.zeros(M, N)}
    given |= {name: torch.randn(N) for name in VECTORS}
    if norm == "rms":
        del given["bias"]
    return given | {"fadd": 1, "fquant": 1, "save_mv": True}


def plain(norm: str) -> dict[str, Any]:
    return {name: fused(norm)[name] for name in ("x", "weight", "bias") if name in fused(norm)}


def backward(norm: str) -> dict[str, Any]:
    return {**backward_operands(norm), "wants": ("dx", "dweight", "dx_bias")}


def check(norm: str, given: dict[str, Any]) -> None:
    """Hold a forward call, or a backward one, against the oracle."""
    if "dy" not in given:
        inputs = {name: value for name, value in given.items() if name not in ("out", "residual_out")}
        return agree(FORWARD[norm](**given), ORACLE[norm](**inputs))
    actual = check_backward(norm, **given)
    assert {name for name, gradient in actual._asdict().items() if gradient is not None} == set(given["wants"])
    assert there(actual.dx).dtype == given["x"].dtype
    return None


GRADIENTS = ("dy", "dresidual_out")
KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], tuple[str, ...]]] = {
    "bf16": (torch.Tensor.bfloat16, (*VECTORS, "x", "residual", *GRADIENTS)),
    "gaps": (LAYOUTS["gapped"], (*ROWS, *GRADIENTS)),
    "misaligned": (misaligned, (*VECTORS, *ROWS, *GRADIENTS, "mean", "rstd")),
    "absent": (lambda tensor: None, ("dresidual_out",)),
}


def told(launcher: Launcher) -> dict[str, object]:
    """What the compiler was told of each operand that is there, by its name."""
    types = {name: word for name, word in launcher.key.arguments if name.endswith("_ptr") and word is not None}
    return {"out" if name == "y_ptr" else name.removesuffix("_ptr"): word for name, word in types.items()}


def true(given: dict[str, Any]) -> dict[str, object]:
    """What is true of them."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return {name: pointer_type(t.dtype, aligned=t.data_ptr() % 16 == 0) for name, t in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [plain, fused, backward])
@each_norm
def test_another_kind_of_operand_is_another_kind_of_call(
    norm: str, arguments: Callable[[str], dict[str, Any]], kind: str, launched: list[Launcher]
) -> None:
    """A kernel of the call before would read another type, or, on a GPU, fault on a misaligned address."""
    usual = arguments(norm)
    check(norm, usual)
    change, names = KINDS[kind]
    for name in [name for name in names if name in usual]:
        other = usual | {name: change(usual[name])}
        if name == "residual" and kind == "bf16":
            other["residual_out"] = usual["residual_out"].bfloat16()
        launched.clear()
        check(norm, other)
        # The first launch is of the kernel that walks the rows.
        assert true(other).items() <= told(launched[0]).items(), name


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

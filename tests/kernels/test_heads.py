"""What Triton makes of rows on several strides: loads as wide as those of one stride, no division, and no spills."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from normforge.call_kinds import MOST_ROWS_IN_I32
from normforge.calls.check import check
from normforge.calls.plan import Plan
from normforge.kernels.gpu import Target
from normforge.kernels.obtain import compile_for

from ..thorough import THOROUGH
from .compilation import SM_90, TARGETS, usage

pytestmark = pytest.mark.compile

TOKENS, HEADS, ALL_HEADS = 16, 32, 48
MANY = 8192 * HEADS

WIDE = re.compile(r"(?:ld|st)\.global[\w.:]*\.v4|global_(?:load|store)_dwordx4")
# What a division of 64 bits comes to, or one of 32.
DIVISION = re.compile(r"\bdiv\.[su](?:32|64)|v_rcp_iflag")


def compiled(function: str, m: int, x: torch.Tensor, target: Target = SM_90, **given: Any) -> Any:
    """The kernel that walks the rows of a call, of so many rows."""
    n, per_row = x.shape[-1], torch.empty(x.shape[:-1])
    given |= {"x": x, "weight": torch.empty(n, dtype=x.dtype)}
    if function.endswith("bwd"):
        given = {"dy": torch.empty(x.shape, dtype=x.dtype), "wants": ("dx", "dweight"), "rstd": per_row, **given}
        given |= {"mean": per_row} if function.startswith("layer") else {}
    launcher = Plan(check(function, given), (), target).prepared(m).launchers[0]
    return compile_for(launcher.key, launcher.kernel, target)


def text(binary: Any) -> str:
    return str(binary.asm.get("ptx") or binary.asm["amdgcn"])


def heads(n: int) -> torch.Tensor:
    return torch.empty(TOKENS, ALL_HEADS * n, dtype=torch.bfloat16)[:, : HEADS * n].view(TOKENS, HEADS, n)


# The tensors that lie on two strides besides x, or on three.
CASES: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "rmsnorm2d_fwd": lambda x: {"out": x},
    "layernorm2d_fwd": lambda x: {},
    "rmsnorm2d_bwd": lambda x: {"dy": torch.empty(1, HEADS, TOKENS, x.shape[-1], dtype=x.dtype)[0].transpose(0, 1)},
    "layernorm2d_bwd": lambda x: {"dy": x},
}


@pytest.mark.parametrize("m", [MANY, pytest.param(8, marks=THOROUGH)], ids=["many", "few"])
@pytest.mark.parametrize("n", [128, *[pytest.param(n, marks=THOROUGH) for n in (64, 256)]])
@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_heads_are_moved_as_rows_of_one_stride_are(target: Target, function: str, n: int, m: int) -> None:
    x = heads(n)
    plain = compiled(function, m, x[:, 0], target)
    walked = compiled(function, m, x, target, **CASES[function](x))
    assert len(WIDE.findall(text(walked))) == len(WIDE.findall(text(plain)))
    assert not DIVISION.search(text(walked))
    if target.is_nvidia:
        assert usage(walked).local == 0
        # A multiprocessor holds as many programs.
        assert usage(walked).registers <= max(usage(plain).registers + 8, 64)


def test_rows_beyond_an_i32_are_divided() -> None:
    """Their reciprocal would not be exact."""
    assert DIVISION.search(text(compiled("rmsnorm2d_fwd", MOST_ROWS_IN_I32 + 1, heads(128))))


def test_three_strides_and_one_are_one_kernel_each() -> None:
    """Sizes and strides are arguments, so that other ones compile nothing."""

    def keys(x: torch.Tensor) -> set[Any]:
        plan = Plan(check("rmsnorm2d_fwd", {"x": x}), (), SM_90)
        return {launcher.key for launcher in plan.prepared(MANY).launchers}

    one, two = keys(heads(128)[:, 0]), keys(heads(128))
    three = keys(torch.empty(2, HEADS, TOKENS, 128, dtype=torch.bfloat16).transpose(1, 2))
    assert len(one | two | three) == 3
    assert two == keys(torch.empty(5, 9 * 128, dtype=torch.bfloat16)[:, : 7 * 128].view(5, 7, 128))
    # A jump back too: that of a transposed tensor.
    assert two == keys(torch.empty(HEADS, TOKENS, 128, dtype=torch.bfloat16).transpose(0, 1))

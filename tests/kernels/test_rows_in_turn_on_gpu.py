"""Kernels whose programs take several rows in turn, with more rows than programs, on a card, against the oracle."""

from __future__ import annotations

import pytest
import torch

import normforge
from normforge import LayerNormOutput, reference
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, DType, FusedAdd, Norm
from normforge.tools.compare import compare

from ..norms import FULL
from .problems import Problem

pytestmark = pytest.mark.gpu

# Enough for three rounds and a part of one of any team or program of an H200.
LONG_ROWS, ODD_ROWS, GRADIENT_ROWS = 700, 5003, 1101
CHECKED = 24


def drawn(m: int, n: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Rows whose first element is `shift` elements beyond a multiple of 16 bytes."""
    memory = torch.randn(m * n + shift, device="cuda", dtype=dtype)
    return (memory * 2 + 3)[shift:].view(m, n)


def agrees(
    norm: str, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *, save_mv: bool = False
) -> None:
    """The first rows, the last, and some between, for the oracle takes a while."""
    at = torch.linspace(0, len(x) - 1, CHECKED, device="cuda").long()
    if norm == "layer":
        actual = normforge.layernorm2d_fwd(x, weight, bias, save_mv=save_mv)
        expected = reference.layernorm2d_fwd(x[at], weight, bias, save_mv=save_mv)
    else:
        actual = normforge.rmsnorm2d_fwd(x, weight, save_mv=save_mv)
        expected = reference.rmsnorm2d_fwd(x[at], weight, save_mv=save_mv)
    some = LayerNormOutput(
        actual.y[at], None, None, *(None if output is None else output[at] for output in (actual.mean, actual.rstd))
    )
    findings = compare(some, expected)
    assert [finding for finding in findings if not finding.ok] == []
    assert all(not output.isnan().any() for output in actual if output is not None)


LONG = [(LONG_ROWS, n) for n in (70000, 131071, 131072, 262144)]
STARTING_ANYWHERE = [(ODD_ROWS, n) for n in (1501, 2047, 3001, 4099, 5137, 6145, 7001)]
# Of one window's length.
MORE_OR_FEWER = [(m, 4099) for m in (1, 7, 8, 9, 300, 528, 529)]


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("m", "n"), [*LONG, *STARTING_ANYWHERE, *MORE_OR_FEWER])
@pytest.mark.parametrize("save_mv", [False, True], ids=["", "mv"])
def test_rows(m: int, n: int, dtype: torch.dtype, norm: str, save_mv: bool) -> None:
    weight, bias = (torch.randn(n, device="cuda", dtype=dtype) for _ in range(2))
    agrees(norm, drawn(m, n, dtype), weight, bias, save_mv=save_mv)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("case", ["x", "weight", "bias", "fp32 weight", "no weight", "nothing"])
def test_long_rows_that_cannot_be_read_in_pairs(case: str, norm: str) -> None:
    """Or of which some operands cannot: pairs at an address that is no multiple of 4 bytes would fault."""
    n = 131072
    x = drawn(LONG_ROWS, n, torch.bfloat16, shift=int(case == "x"))
    weight, bias = (drawn(1, n, torch.bfloat16, shift=int(case == name))[0] for name in ("weight", "bias"))
    agrees(
        norm,
        x,
        weight.float() if case == "fp32 weight" else None if case in ("no weight", "nothing") else weight,
        None if case == "nothing" else bias,
    )


@pytest.mark.parametrize("norm", FULL, ids=lambda norm: norm.value)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("fadd", [FusedAdd.NONE, FusedAdd.PRE_ADD_STORE], ids=lambda fadd: fadd.value)
@pytest.mark.parametrize("n", [3072, 4096, 5120, 7168, 8192, 12288, 65536])
def test_gradients(n: int, fadd: FusedAdd, dtype: DType, norm: Norm) -> None:
    Problem(Mode(norm, dtype, dtype, fadd, direction=Direction.BACKWARD), GRADIENT_ROWS, n).check("cuda")


@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
@pytest.mark.parametrize("n", [4095, 7168, 12288])
@pytest.mark.parametrize("case", ["odd", "fp32 dy", "odd stride"])
def test_gradients_of_rows_that_cannot_be_read_in_pairs(case: str, n: int, norm: Norm) -> None:
    """Or of which one tensor can, and the other cannot."""
    problem = Problem(
        Mode(norm, DType.BF16, DType.BF16, direction=Direction.BACKWARD),
        GRADIENT_ROWS,
        n - n % 2 - 1 if case == "odd" else n,
        stride=n + 1 + n % 2 if case == "odd stride" else None,
        dtypes={"dy": DType.FP32} if case == "fp32 dy" else {},
    )
    problem.check("cuda")

"""On a card: programs with several rows in turn, scales in steps without branches, and launches that start early."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import normforge
from normforge import LayerNormOutput
from normforge.codegen.model import Mode
from normforge.codegen.values import Direction, DType, Norm
from normforge.families.public import layernorm2d_bwd

from ..calling import FORWARD, ORACLE, agree, captured
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
    vectors = (weight, bias) if norm == "layer" else (weight,)
    actual = FORWARD[norm](x, *vectors, save_mv=save_mv)
    some = LayerNormOutput._make(None if output is None else output[at] for output in actual)
    agree(some, ORACLE[norm](x[at], *vectors, save_mv=save_mv))
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


# Untyped, as everything generated.
primitives = import_module("normforge.generated.primitives")

BLOCK = 1 << 13
SCALE, INVERSE = primitives.row_scale, primitives.inverse_of


def _differ(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return (a.to(tl.int32, bitcast=True) != b.to(tl.int32, bitcast=True)) & ((a == a) | (b == b))


differ: Any = triton.jit(_differ)


def _count(counts_ptr: tl.tensor, QMAX: tl.constexpr, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0)
    amax_bits = program * BLOCK + tl.arange(0, BLOCK)
    expected = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), QMAX)
    expected = tl.where(expected < 2.0**-126, 1.0, expected)
    scale = SCALE(amax_bits, QMAX, tl.float32)
    wrong = differ(scale, expected) | differ(INVERSE(scale, True), tl.div_rn(1.0, expected))
    tl.store(counts_ptr + program, tl.sum(wrong.to(tl.int32)))


count_kernel: Any = triton.jit(_count)


@pytest.mark.parametrize("qmax", [6.0, 127.0, 240.0, 448.0, 57344.0])
def test_scales_and_inverses_are_those_of_division(qmax: float) -> None:
    counts = torch.empty((1 << 31) // BLOCK, dtype=torch.int32, device="cuda")
    count_kernel[(len(counts),)](counts, qmax, BLOCK)
    assert counts.sum().item() == 0


CALLS = 60
SHAPES = [(1, 64), (7, 4096), (300, 8192), (4096, 1024), (2000, 5137), (64, 65536), (96, 131072), (16384, 512)]


def chain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, waits: bool) -> None:
    """Norms and a kernel of torch's in turn, all in place."""
    for call in range(CALLS):
        if call % 3 == 0:
            normforge.rmsnorm2d_fwd(x, weight, residual=residual, fadd="pre_add_store", out=x, residual_out=residual)
        elif call % 3 == 1:
            normforge.layernorm2d_fwd(x, weight, weight, out=x)
        else:
            x.mul_(1.5)
        if waits:
            torch.cuda.synchronize()


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_each_call_sees_all_that_the_one_before_wrote(m: int, n: int, graph: bool) -> None:
    x, residual = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(n, device="cuda", dtype=torch.bfloat16) + 0.5
    expected, actual = ((x.clone(), residual.clone()) for _ in range(2))
    chain(*expected, weight, waits=True)
    if graph:
        recorded, _ = captured(lambda: chain(*actual, weight, waits=False))
        for got, start in zip(actual, (x, residual), strict=True):
            got.copy_(start)
        recorded.replay()
    else:
        chain(*actual, weight, waits=False)
    torch.cuda.synchronize()
    assert [torch.equal(got, want) for got, want in zip(actual, expected, strict=True)] == [True, True]


@pytest.mark.parametrize(("m", "n"), [(64, 1024), (4096, 1024), (3000, 4096), (64, 20000), (3000, 20000)])
def test_sums_over_rows_wait_for_all_programs(m: int, n: int) -> None:
    """The launch that adds partial sums up is admitted while the ones ahead of it still write them."""
    x, dy = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    saved: Any = normforge.layernorm2d_fwd(x, weight, weight, save_mv=True)
    found = []
    for _ in range(CALLS):
        found.append(layernorm2d_bwd(dy, x, weight, mean=saved.mean, rstd=saved.rstd, wants=("dx", "dweight", "dbias")))
        # What the next call is given of this memory is not zero.
        torch.full((2 * n * 528,), float("nan"), device="cuda")
    h = (x.double() - saved.mean.double().unsqueeze(-1)) * saved.rstd.double().unsqueeze(-1)
    for name, want in (("dweight", (dy.double() * h).sum(0)), ("dbias", dy.double().sum(0))):
        torch.testing.assert_close(getattr(found[0], name).double(), want, rtol=1e-2, atol=1e-2 * m**0.5)
        assert all(torch.equal(getattr(gradients, name), getattr(found[0], name)) for gradients in found)

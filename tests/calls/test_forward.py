"""Forward calls: any dimensions, strides and operands' types, and outputs in the caller's own tensors.

Random calls of `tests/properties` combine these, and hold outputs over inputs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm
from normforge.selection import dispatch

from ..calling import FLOATS, FORWARD, QUANTISED, check, each_norm, each_pipeline, quantising
from .shared import there

M, N = 3, 96
POISON = 0x5A


def everything(x: torch.Tensor) -> dict[str, Any]:
    """Arguments that ask for every output there is."""
    return {"x": x, "residual": torch.randn(x.shape), "fadd": "pre_add_store", "fquant": "dynamic", "save_mv": True}


@pytest.mark.parametrize("shape", [(N,), (5, N), (2, 3, N), (2, 1, 3, N), (1, 1, 1, N)], ids=str)
@each_norm
def test_dimensions(norm: str, shape: tuple[int, ...]) -> None:
    arguments = everything(torch.randn(shape))
    actual = check(norm, **arguments)
    assert actual.y.shape == shape
    for name in ("y_scale", "mean", "rstd"):
        per_row = getattr(actual, name)
        assert per_row is None or per_row.shape == shape[:-1], name
    # Rows are rows, however many dimensions they are spread over.
    flat = FORWARD[norm](**{k: v.reshape(-1, N) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()})
    for a, b in zip(actual, flat, strict=True):
        assert a is b is None or (a is not None and b is not None and torch.equal(a.flatten(), b.flatten()))


def _slice(rows: int, n: int) -> torch.Tensor:
    wide = torch.full((rows, n + 5), float("nan"))
    wide[:, 2 : n + 2] = torch.randn(rows, n)
    return wide[:, 2 : n + 2]


# Rows by the layout that they have.
STRIDED: dict[str, Callable[[int, int], torch.Tensor]] = {
    "slice of a wider tensor": _slice,
    "every other row": lambda rows, n: torch.randn(2 * rows, n)[::2],
    "one row expanded": lambda rows, n: torch.randn(n).expand(rows, n),
    "rows that overlap": lambda rows, n: torch.randn(3 * rows + n).as_strided((rows, n), (3, 1)),
    "rows in reverse memory order": lambda rows, n: torch.randn(rows, n).flip(0),
}


@pytest.mark.parametrize("kind", STRIDED, ids=lambda kind: kind.replace(" ", "_"))
@each_pipeline
def test_row_strides(n: int, kind: str) -> None:
    check("layer", STRIDED[kind](3, n), residual=STRIDED["slice of a wider tensor"](3, n), fadd="pre_add", save_mv=True)
    check("rms", torch.randn(3, n), residual=STRIDED[kind](3, n), fadd="pre_add_store", fquant="dynamic")


@each_pipeline
def test_every_tensor_has_a_row_stride_of_its_own(n: int) -> None:
    x, residual, out, residual_out = (torch.randn(3, n + extra)[:, :n] for extra in (1, 20, 300, 0))
    check("layer", x, residual=residual, fadd="pre_add_store", out=out, residual_out=residual_out)


@pytest.mark.parametrize("stride", [0, 1, 7, 10**9])
def test_strides_of_single_rows_and_columns_mean_nothing(stride: int) -> None:
    one_row = torch.randn(N)
    x = one_row.as_strided((1, N), (stride, 1))
    out = torch.zeros(N).as_strided((1, N), (stride, 1))
    check("layer", x, out=out)
    check("layer", torch.randn(4, 1, N).as_strided((4, 1, N), (N, stride, 1)))
    # One column: the last dimension's stride is never taken.
    check("rms", torch.randn(5).as_strided((5, 1), (1, stride)))


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty grid is an error on a GPU, and nothing in the interpreter."""
    entry = dispatch.find(Mode(Norm.LAYER, DType.FP32, DType.FP32), N)
    kernel = entry.load(entry.tile(1, entry.first, "cpu").pipeline)

    def launched(grid: object) -> None:
        raise AssertionError(f"launched over {grid}")

    monkeypatch.setattr(type(kernel), "__getitem__", lambda self, grid: launched(grid))
    FORWARD["layer"](torch.empty(0, N))
    with pytest.raises(AssertionError, match=r"launched over \(1, 1, 1\)"):
        FORWARD["layer"](torch.empty(1, N))


def poisoned(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A wider and taller tensor full of one byte, and the (M, n) view in the midst of it."""
    around = torch.full((M + 2, (n + 10) * dtype.itemsize), POISON, dtype=torch.uint8).view(dtype)
    return around, around[1:-1, 3 : 3 + n]


def assert_poisoned_around(around: torch.Tensor, n: int) -> None:
    """Fail if any byte outside the view was written."""
    size = around.dtype.itemsize
    left = around.view(torch.uint8).clone()
    left[1:-1, 3 * size : (3 + n) * size] = POISON
    assert bool((left == POISON).all())


@pytest.mark.parametrize("dtype", FLOATS + QUANTISED, ids=str)
@each_pipeline
@each_norm
def test_given_tensors_are_written_and_nothing_around_them(norm: str, n: int, dtype: torch.dtype) -> None:
    around, out = poisoned(n, dtype)
    wider, residual_out = poisoned(n, torch.bfloat16)
    summed: dict[str, Any] = {"residual": torch.randn(M, n).bfloat16(), "fadd": "pre_add_store", **quantising(dtype)}
    actual = check(norm, torch.randn(M, n), out=out, residual_out=residual_out, **summed)
    assert actual.y is out
    assert actual.residual_out is residual_out
    assert_poisoned_around(around, n)
    assert_poisoned_around(wider, n)


@each_pipeline
def test_every_operand_in_another_dtype(n: int) -> None:
    operands = {name: torch.randn(n) for name in ("weight", "bias", "x_bias", "smooth_scale")}
    operands["residual"] = torch.randn(M, n)
    given: dict[str, Any] = {name: each.to(FLOATS[place % 3]) for place, (name, each) in enumerate(operands.items())}
    given |= {"fadd": "pre_add_store", "fquant": "smooth_dynamic", "out_dtype": torch.float8_e4m3fn, "save_mv": True}
    check("layer", torch.randn(M, n).bfloat16(), **given)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@each_norm
def test_outputs_are_rounded_once(norm: str, dtype: torch.dtype) -> None:
    """To nearest even, from the fp32 values that a call with an output in fp32 returns."""
    x, residual = torch.randn(M, 700), torch.randn(M, 700).to(dtype)
    assert torch.equal(FORWARD[norm](x, out_dtype=dtype).y, FORWARD[norm](x).y.to(dtype))
    stored = FORWARD[norm](x, residual=residual, fadd="pre_add_store").residual_out
    assert torch.equal(there(stored), (x + residual).to(dtype))


@each_pipeline
def test_x_bias_is_added_to_every_row_and_to_the_stored_sum(n: int) -> None:
    x, x_bias, residual = torch.randn(M, n), torch.randn(n), torch.randn(M, n)
    actual = check("rms", x, x_bias=x_bias, residual=residual, fadd="pre_add_store")
    torch.testing.assert_close(there(actual.residual_out), x + x_bias + residual, rtol=0, atol=1e-6)

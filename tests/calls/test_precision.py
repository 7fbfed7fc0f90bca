"""Rows that a careless kernel gets wrong: far from zero, ragged, constant, not finite, single or none; one rounding."""

from __future__ import annotations

import pytest
import torch

from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm
from normforge.selection import dispatch

from ..calling import (
    FLOATS,
    FORWARD,
    ORACLE,
    assert_squares_overflow_to_zeros,
    check,
    each_norm,
    each_pipeline,
    same_bits,
    there,
)
from ..thorough import THOROUGH

# Numpy, which interprets kernels, remarks on the NaN, infinities and divisions by zero that are tested here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def _outliers(n: int) -> dict[str, torch.Tensor]:
    """Rows of 16 bits whose first values, which kernels take their pivots from, are unlike the rest."""
    noise = torch.randn(n)
    rows = {
        "one_massive_activation": (1, 3000.0, noise),
        "eight_far_away": (8, 777.0, 1e-3 * noise),
        "a_chunk_far_away": (256, 777.0, 1e-3 * noise),
        "eight_huge": (8, 3e17, noise),
        "eight_whose_squares_overflow": (8, 4e18, noise),
    }
    made = {}
    for name, (count, value, others) in rows.items():
        row = others.bfloat16()
        row[:count] = value
        made[name] = row.unsqueeze(0)
    return made


@pytest.mark.parametrize("name", _outliers(8))
@pytest.mark.parametrize(("m", "n"), [(2, 300), (2, 1024), (2, 4096), (2, 16384), (2, 65536), (257, 300)])
def test_layernorm_of_rows_that_start_with_outliers(m: int, n: int, name: str) -> None:
    """Torch's own operator is off by 1e-7 in rstd; a pivot from eight values, never looked at again, by 2e-4."""
    x = _outliers(n)[name].expand(m, n)
    oracle = ORACLE["layer"](x[:1], save_mv=True)
    actual = FORWARD["layer"](x, save_mv=True, out_dtype=torch.float32)
    torch.testing.assert_close(there(actual.rstd)[:1], there(oracle.rstd), rtol=1e-6, atol=0)
    assert (actual.y[:1] - oracle.z).abs().max() <= 1e-6 * oracle.z.abs().max()
    assert same_bits(actual.y, actual.y[:1].expand(m, n))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_mean_of_small_integers_is_exact(dtype: torch.dtype) -> None:
    """Around a pivot of more bits than they have (5 / 6, of the first values), each deviation is rounded alike."""
    x = torch.randint(-100, 101, (8, 1024)).to(dtype)
    x[:, :8] = torch.tensor([0, 0, 1, 1, 1, 2, 3, -3])
    mean = FORWARD["layer"](x, save_mv=True).mean
    assert torch.equal(there(mean).double(), x.double().mean(-1))


@each_pipeline
def test_a_bad_value_in_the_last_column_is_seen(n: int) -> None:
    """Where a masked chunk could hide it."""
    for norm in FORWARD:
        x = torch.randn(2, n)
        x[0, -1] = float("nan")
        assert not there(FORWARD[norm](x, fquant="dynamic").y_scale)[0].isfinite()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("value", [1e20, 1e30])
# Of rows, one_pass and window (in bf16), and of two_pass: where rows are many, or longer than any chunk holds.
@pytest.mark.parametrize(
    ("m", "n"),
    [
        (3, 8),
        (3, 300),
        (3, 1500),
        (3, 4099),
        (3, 6000),
        (3, 20000),
        pytest.param(258, 20000, marks=THOROUGH),
        (3, 40000),
    ],
)
def test_rows_whose_squares_overflow_are_zeros_in_every_pipeline(m: int, n: int, value: float) -> None:
    assert_squares_overflow_to_zeros(m, n, value, "cpu")


M, N = 3, 96


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


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@each_norm
def test_outputs_are_rounded_once(norm: str, dtype: torch.dtype) -> None:
    """To nearest even, from the fp32 values that a call with an output in fp32 returns."""
    x, residual = torch.randn(M, 700), torch.randn(M, 700).to(dtype)
    assert torch.equal(FORWARD[norm](x, out_dtype=dtype).y, FORWARD[norm](x).y.to(dtype))
    stored = FORWARD[norm](x, residual=residual, fadd="pre_add_store").residual_out
    assert torch.equal(there(stored), (x + residual).to(dtype))

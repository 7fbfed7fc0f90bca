"""What random calls of `tests/properties` do not come to: strides without a meaning, no rows, and one rounding."""

from __future__ import annotations

import pytest
import torch

from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm
from normforge.selection import dispatch

from ..calling import FLOATS, FORWARD, check, each_norm
from .shared import there

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

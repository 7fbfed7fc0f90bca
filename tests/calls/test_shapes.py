"""Every shape and every layout that can be walked: any number of dimensions, any row stride, no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm
from normforge.selection import dispatch

from ..calling import FORWARD, check, each_norm, each_pipeline

N = 96


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

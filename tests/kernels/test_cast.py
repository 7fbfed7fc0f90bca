"""Rows that are rounded before the weight, in the interpreter: in every kernel, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge import LayerNormOutput, reference
from normforge.codegen.model import Mode
from normforge.codegen.values import Cast, Direction, DType, FusedQuant, Norm, Part, Pipeline
from normforge.dtypes import TORCH_DTYPES

from ..norms import FULL
from .bare import EPS, OFFSET, check_forward, check_gradients, run, run_backward, run_forward, saved
from .rendering import kernel_of

M = 6


@dataclass(frozen=True)
class Cut:
    """How a kernel takes rows: the kernel, its grid, the row length, and its constants."""

    part: Pipeline | Part
    grid: tuple[int, ...]
    n: int
    values: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.part.value}_{self.n}"


FORWARD = (
    Cut(Pipeline.ROWS, (2,), 100, {"ROWS": 4, "BLOCK": 128}),
    Cut(Pipeline.ONE_PASS, (M,), 100, {"BLOCK": 64}),
    Cut(Pipeline.ONE_PASS, (M,), 200, {"BLOCK": 64}),
    Cut(Pipeline.TWO_PASS, (M,), 200, {"BLOCK": 64, "HELD": 0}),
    Cut(Pipeline.TWO_PASS, (M,), 200, {"BLOCK": 64, "HELD": 2}),
    Cut(Pipeline.SPREAD, (1, 2), 100, {"BLOCK": 64, "HELD": 2, "PEERS": 1}),
    Cut(Part.WINDOW, (M,), 203, {"BLOCK": 64, "VECTOR": 8}),
)
QUANTISING = tuple(cut for cut in FORWARD if cut.part in (Pipeline.ROWS, Pipeline.ONE_PASS, Pipeline.TWO_PASS))
BACKWARD = (
    Cut(Pipeline.ROWS, (2,), 100, {"ROWS": 4, "BLOCK": 128}),
    Cut(Pipeline.ONE_PASS, (3,), 100, {"BLOCK": 64}),
    Cut(Pipeline.TWO_PASS, (2, 3), 100, {"ROWS": 2, "BLOCK": 64}),
    Cut(Pipeline.SPREAD, (1, 2), 50, {"ROWS": 2, "BLOCK": 64, "PEERS": 1}),
)

# Of x and y: Llama's with a weight of x's type and with one of fp32, and T5's where its feed-forward part is fp32.
TYPES = (
    (DType.BF16, DType.BF16),
    (DType.FP16, DType.FP16),
    (DType.BF16, DType.FP32),
    (DType.FP32, DType.FP16),
    (DType.FP16, DType.BF16),
)


def launched(package: Path, cut: Cut, mode: Mode, x: torch.Tensor, vectors: dict[str, torch.Tensor]) -> LayerNormOutput:
    given = vectors | {"x": x, "exchange": torch.full((M, 1), -1)}
    return run_forward(kernel_of(package, mode, cut.part), cut.grid, mode, given, cut.values)


@pytest.mark.parametrize(("dtype", "out"), TYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("norm", FULL, ids=lambda norm: norm.value)
@pytest.mark.parametrize("cut", FORWARD, ids=str)
def test_a_row_is_rounded_before_the_weight(cut: Cut, norm: Norm, dtype: DType, out: DType, package: Path) -> None:
    """With a weight of 16 bits the product is exact in fp32, so that two roundings decide all bits of y."""
    mode = Mode(norm, dtype, out, save_mv=True, cast=Cast.BEFORE_WEIGHT)
    if cut.part is Part.WINDOW and not mode.has_window:
        cut = Cut(Pipeline.ONE_PASS, cut.grid, cut.n, {"BLOCK": 64})
    x = (torch.randn(M, cut.n) * 3 + 1).to(TORCH_DTYPES[dtype])
    half = TORCH_DTYPES[out if out.itemsize == 2 else dtype]
    weight = torch.randn(cut.n).to(half)
    y = launched(package, cut, mode, x, {"weight": weight}).y
    asked: dict[str, Any] = {"eps": EPS, "out_dtype": TORCH_DTYPES[out]}
    asked |= {} if norm.centres else {"weight_offset": OFFSET}
    function = reference.layernorm2d_fwd if norm.centres else reference.rmsnorm2d_fwd
    expected, once = function(x, weight, **asked, cast="before_weight"), function(x, weight, **asked)
    assert expected.open is not None
    # A row of fp32 that lies between two values of 16 bits may become either.
    told = expected.open == 0
    assert told.float().mean() > 0.6
    product = expected.z.float()[told]
    assert torch.equal(y[told], product.to(y.dtype))
    # It makes a difference.
    assert not torch.equal(once.z.float()[told].to(y.dtype), y[told])


@pytest.mark.parametrize("weighted", [True, False], ids=["", "no_weight"])
@pytest.mark.parametrize(
    ("dtype", "out"),
    [(DType.BF16, DType.INT8), (DType.FP16, DType.INT8), (DType.BF16, DType.FP8_E4M3FNUZ)],
    ids=lambda dtype: dtype.value,
)
@pytest.mark.parametrize("norm", FULL, ids=lambda norm: norm.value)
@pytest.mark.parametrize("cut", QUANTISING, ids=str)
def test_a_row_is_rounded_before_it_is_quantised(
    cut: Cut, norm: Norm, dtype: DType, out: DType, weighted: bool, package: Path
) -> None:
    mode = Mode(norm, dtype, out, fquant=FusedQuant.DYNAMIC, cast=Cast.BEFORE_WEIGHT)
    x = (torch.randn(M, cut.n) * 3 + 1).to(TORCH_DTYPES[dtype])
    vectors = {"weight": torch.randn(cut.n)} if weighted else {}
    vectors |= {"bias": torch.randn(cut.n)} if norm.centres else {}
    actual = launched(package, cut, mode, x, vectors)
    offset = {} if weighted else {"weight": torch.full((cut.n,), 1 - OFFSET)}
    check_forward(actual, mode, x, vectors if norm.centres else offset | vectors)


@pytest.mark.parametrize("dy", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("norm", FULL, ids=lambda norm: norm.value)
@pytest.mark.parametrize("cut", BACKWARD, ids=str)
def test_dweight_is_of_the_rounded_row_and_dx_of_the_row(
    cut: Cut, norm: Norm, dtype: DType, dy: torch.dtype, package: Path
) -> None:
    mode = Mode(norm, dtype, dtype, direction=Direction.BACKWARD, cast=Cast.BEFORE_WEIGHT)
    given = {"x": (torch.randn(M, cut.n) * 2 + 1).to(TORCH_DTYPES[dtype]), "dy": torch.randn(M, cut.n).to(dy)}
    given |= {"weight": torch.randn(cut.n)}
    given |= saved(mode, given["x"], None)
    made = {"dx": torch.full((M, cut.n), float("nan"), dtype=TORCH_DTYPES[dtype])}
    made |= {"exchange": torch.full((M, 1, cut.values.get("ROWS", 1)), -1)}
    if cut.part is Pipeline.TWO_PASS:
        made |= {name: torch.zeros(M) for name in ("gh_mean", "g_mean")}
        terms = {f"{name}_ptr": tensor for name, tensor in (given | made).items()}
        strides = {"dy_row_stride": cut.n, "x_row_stride": cut.n}
        run(kernel_of(package, mode, Part.ROW_TERMS), (M,), terms | strides | {"N": cut.n, "BLOCK": 128})
    actual = run_backward(kernel_of(package, mode, cut.part), cut.grid, mode, given | made, cut.values)
    check_gradients(actual, mode, given)

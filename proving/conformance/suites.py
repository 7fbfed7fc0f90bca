"""The established suites' shapes and dtypes, as data, and the cases that they come to.

ck_tile's layernorm2d and rmsnorm2d smoke tests, vLLM's layernorm and fused quantisation tests, QuACK's,
flash-attention's, Liger's and FlashInfer's, and Triton's tutorial 05.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from . import tolerances
from .case import BF16, E4M3FN, FP16, FP32, INT8, RESIDUAL_OUT, Case, Draw, Inputs, Norm, Y

FLOATS = (FP16, BF16, FP32)
BOTH = (Y, RESIDUAL_OUT)
# A forward call, and a backward pass from y.
EACH_WAY: tuple[tuple[str, ...], ...] = ((), (Y,))
EACH_GRADIENT: tuple[tuple[str, ...], ...] = ((Y,), (RESIDUAL_OUT,), BOTH)

_HALF = Draw("uniform", spread=0.5)
CK_TILE_INPUTS = Inputs(
    "ck_tile", x=_HALF, residual=_HALF, weight=_HALF, bias=_HALF, x_bias=_HALF, smooth_scale=Draw("uniform")
)
# (m, n, row stride), the stride None where rows adjoin.
CK_TILE_SHAPES: tuple[tuple[int, int, int | None], ...] = (
    (99, 13, None),
    (17, 16, None),
    (1, 100, None),
    (4, 128, None),
    (80, 127, None),
    (22, 255, 256),
    (7, 599, None),
    (19, 512, None),
    (33, 313, 1000),
    (11, 510, None),
    (171, 676, 818),
    (91, 636, None),
    (12, 768, 800),
    (100, 766, 812),
    (31, 1024, None),
    (64, 1000, 1004),
    (8, 1501, None),
    (3, 1826, None),
    (5, 2040, None),
    (7, 2734, None),
    (1, 3182, None),
    (9, 4096, None),
    (3, 8192, None),
    (3, 9120, None),
    (1, 10547, None),
    (3, 17134, None),
)
CK_TILE_QUANT = (
    ("none", None),
    ("smooth_dynamic", INT8),
    ("smooth_dynamic", E4M3FN),
    ("dynamic", INT8),
    ("dynamic", E4M3FN),
)
CK_TILE_FADD = ("none", "pre_add_store", "pre_add")
CK_TILE_DEFAULT = (3328, 4096)

# Activations of unit norm or so, and weights near 1.
VLLM_INPUTS = Inputs(
    "vllm",
    x=Draw("normal", over_2n=True),
    residual=Draw("normal", over_2n=True),
    weight=Draw("normal", centre=1.0, spread=0.1),
    bias=Draw("normal", spread=0.1),
)
VLLM_TOKENS = (7, 83, 4096)
VLLM_FADD = ("none", "pre_add_store")
VLLM_HIDDEN = (8, 768, 769, 5120, 5125, 8192)
VLLM_QUANT_SHAPES = (
    *((1, n) for n in (1, 64, 128, 1024, 1025, 1027, 1029, 5120, 5137)),
    *((2048, n) for n in (1, 64, 1024, 1025, 1027, 1029, 5137)),
    *((4096, n) for n in (1, 64, 5137)),
)

QUACK_INPUTS = Inputs("quack")
QUACK_RAGGED = Inputs("ragged", x=Draw("normal", centre=1000.0, spread=0.1, slope=100.0))
QUACK_M = (1, 37, 199, 4096)
QUACK_N = (256, 512, 760, 1024, 1128, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
QUACK_LARGE = ((32768, 131072), (32768, 262144))

_EIGHTH = Draw("normal", spread=0.125)
FLASH_INPUTS = Inputs("flash_attention", dy=_EIGHTH, dresidual_out=_EIGHTH)
FLASH_N = (192, 2048, 2560, 3000, 4096)
FLASH_DTYPES = ((FP16, FP16), (FP16, FP32), (FP32, FP32), (BF16, BF16), (BF16, FP32))

LIGER_INPUTS = Inputs("liger")
LIGER_SHAPES = (
    (2, 8, 64),
    (4, 16, 128),
    (1, 1, 1023),
    (3, 7, 256),
    (1, 1, 1500),
    (3, 512, 128),
    (5, 123, 123),
    (9, 7, 41),
)

FLASHINFER_INPUTS = Inputs("flashinfer")
FLASHINFER_BATCH = (1, 19, 99, 989)
FLASHINFER_HIDDEN = (111, 500, 1024, 3072, 3584, 4096, 8192, 16384)
FLASHINFER_LAYER = tuple(product((1, 2, 3, 128), (128, 129, 1024, 16384)))

_WIDTH_1 = Draw("uniform", centre=0.5, spread=0.5)
TUTORIAL_INPUTS = Inputs(
    "triton", x=Draw("normal", centre=-2.3, spread=0.5), weight=_WIDTH_1, bias=_WIDTH_1, dy=Draw("normal", spread=0.1)
)
TUTORIAL_SHAPE = (1151, 8192)


def affine(norm: Norm, weight: torch.dtype | None, bias: torch.dtype | None = None) -> dict[str, Any]:
    """Return the dtypes of weight and bias, the same unless another bias is named; RMSNorm has no bias."""
    return {"weight": weight, "bias": (bias or weight) if norm is Norm.LAYER else None}


def adding(residual: torch.dtype, fadd: str = "pre_add_store") -> dict[str, Any]:
    """Return the fields of a fused add, or of none."""
    return {"residual": None if fadd == "none" else residual, "fadd": fadd}


def quantised(fquant: str, out: torch.dtype | None) -> dict[str, Any]:
    """Return the fields of a quantisation; a smooth scale is fp32."""
    return {"smooth_scale": FP32 if fquant == "smooth_dynamic" else None, "out": out, "fquant": fquant}


def ck_tile() -> Iterator[Case]:
    """Its smoke lists, every shape in every mode; and the default problem of its example."""
    case = partial(Case, "ck_tile", inputs=CK_TILE_INPUTS, tolerance=tolerances.CK_TILE)
    for norm in Norm:
        for (m, n, stride), quant, x, fadd, save_mv in product(
            CK_TILE_SHAPES, CK_TILE_QUANT, (FP16, BF16), CK_TILE_FADD, (False, True)
        ):
            more = affine(norm, x) | adding(x, fadd) | quantised(*quant)
            yield case(norm, (m, n), x, **more, save_mv=save_mv, row_stride=stride)
        yield case(norm, CK_TILE_DEFAULT, FP16, **affine(norm, FP16))


def vllm() -> Iterator[Case]:
    """With and without a residual, contiguous and as a slice of rows twice as long; and quantised by token."""
    case = partial(Case, "vllm", inputs=VLLM_INPUTS, eps=1e-6)
    for norm in Norm:
        for m, n, fadd, strided, x in product(VLLM_TOKENS, VLLM_HIDDEN, VLLM_FADD, (False, True), FLOATS):
            more = affine(norm, x) | adding(x, fadd)
            yield case(norm, (m, n), x, tolerance=tolerances.VLLM, **more, row_stride=2 * n if strided else None)
        for shape, fadd, x, out in product(VLLM_QUANT_SHAPES, VLLM_FADD, (BF16, FP32), (INT8, E4M3FN)):
            more = affine(norm, x) | adding(x, fadd) | quantised("dynamic", out)
            yield case(norm, shape, x, tolerance=tolerances.VLLM_QUANT, **more)


def quack() -> Iterator[Case]:
    """Forward with statistics, backward, and the edges of its RMSNorm."""
    for norm in Norm:
        for m, n, x, bias in product(QUACK_M, QUACK_N, FLOATS, (None, FP32)):
            if norm is Norm.RMS and bias is not None:
                continue
            yield quack_case(norm, (m, n), x, weight=FP32, bias=bias, save_mv=True)
            yield quack_case(norm, (m, n), x, weight=FP32, bias=bias, arriving=(Y,))
        for x in FLOATS:
            yield quack_case(norm, (3, 769), x, inputs=QUACK_RAGGED, weight=FP32, save_mv=True)
        yield from _quack_edges(norm)


def quack_case(
    norm: Norm, shape: tuple[int, ...], x: torch.dtype, *, inputs: Inputs = QUACK_INPUTS, **more: Any
) -> Case:
    """Return a case of QuACK's inputs, held to its tolerance."""
    return Case("quack", norm, shape, x, inputs, tolerances.quack(x, math.prod(shape[:-1])), **more)


def _quack_edges(norm: Norm) -> Iterator[Case]:
    both = affine(norm, FP32)
    for arriving in EACH_WAY:
        if norm is Norm.RMS:
            yield quack_case(norm, (199, 1024), BF16, weight=FP32, weight_offset=1.0, arriving=arriving)
        yield quack_case(norm, (8, 4096, 512), BF16, **both, row_stride=576, arriving=arriving)
        for x in FLOATS:
            yield quack_case(norm, (0, 1024), x, **affine(norm, x), arriving=arriving)
    # In PyTorch's mixed precision the gradient comes in bf16 and x is still fp32.
    for m in (37, 199):
        yield quack_case(norm, (m, 1024), FP32, **both, arriving=(Y,), dy=BF16)
    for arriving in EACH_GRADIENT:
        yield quack_case(norm, (32, 1024), FP16, **both, **adding(FP16), eps=1e-6, arriving=arriving)
    for shape in QUACK_LARGE:
        yield quack_case(norm, shape, BF16, **both)


def flash_attention() -> Iterator[Case]:
    """Every pair of x's and residual's dtypes with every dtype of weight, forward and through both outputs."""
    for norm, n, (x, residual), weight in product(Norm, FLASH_N, FLASH_DTYPES, FLOATS):
        tolerance = tolerances.flash_attention(x, residual, weight)
        more = affine(norm, weight) | adding(residual) | {"eps": 1e-6, "arriving": BOTH}
        yield Case("flash_attention", norm, (8, 512, n), x, FLASH_INPUTS, tolerance, **more)


def liger() -> Iterator[Case]:
    """Few and short rows, mostly of odd lengths."""
    for norm, shape, x in product(Norm, LIGER_SHAPES, FLOATS):
        tolerance = tolerances.liger(x, shape[0] * shape[1])
        yield Case("liger", norm, shape, x, LIGER_INPUTS, tolerance, **affine(norm, x), eps=1e-6, arriving=(Y,))


def flashinfer() -> Iterator[Case]:
    """RMSNorm and Gemma's, with and without a residual, and LayerNorm of bf16 with fp32 weights."""
    case = partial(Case, "flashinfer", inputs=FLASHINFER_INPUTS, eps=1e-6)
    for m, n, x, fadd, weight_offset in product(
        FLASHINFER_BATCH, FLASHINFER_HIDDEN, (FP16, BF16), CK_TILE_FADD, (0.0, 1.0)
    ):
        more = adding(x, fadd) | {"weight": x, "weight_offset": weight_offset}
        yield case(Norm.RMS, (m, n), x, tolerance=tolerances.flashinfer(x), **more)
    for shape in FLASHINFER_LAYER:
        yield case(Norm.LAYER, shape, BF16, tolerance=tolerances.flashinfer(BF16), weight=FP32, bias=FP32)


def triton() -> Iterator[Case]:
    """Tutorial 05's problem, forward and backward."""
    more = affine(Norm.LAYER, FP16) | {"arriving": (Y,)}
    yield Case("triton", Norm.LAYER, TUTORIAL_SHAPE, FP16, TUTORIAL_INPUTS, tolerances.TUTORIAL, **more)

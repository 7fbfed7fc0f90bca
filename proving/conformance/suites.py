"""The established suites' shapes and dtypes, as data, and the cases that they come to.

ck_tile's layernorm2d and rmsnorm2d smoke tests, vLLM's layernorm and fused quantisation tests, QuACK's,
flash-attention's, Liger's and FlashInfer's, and Triton's tutorial 05.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

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


def ck_tile() -> Iterator[Case]:
    """Its smoke lists, every shape in every mode; and the default problem of its example."""
    for norm in Norm:
        bias = {FP16: FP16, BF16: BF16} if norm is Norm.LAYER else {}
        for (m, n, stride), (fquant, out), x, fadd, save_mv in product(
            CK_TILE_SHAPES, CK_TILE_QUANT, (FP16, BF16), CK_TILE_FADD, (False, True)
        ):
            yield Case(
                *("ck_tile", norm, (m, n), x, CK_TILE_INPUTS, tolerances.CK_TILE),
                weight=x,
                bias=bias.get(x),
                residual=None if fadd == "none" else x,
                smooth_scale=FP32 if fquant == "smooth_dynamic" else None,
                out=out,
                fadd=fadd,
                fquant=fquant,
                save_mv=save_mv,
                row_stride=stride,
            )
        yield Case(
            *("ck_tile", norm, CK_TILE_DEFAULT, FP16, CK_TILE_INPUTS, tolerances.CK_TILE),
            weight=FP16,
            bias=bias.get(FP16),
        )


def vllm() -> Iterator[Case]:
    """With and without a residual, contiguous and as a slice of rows twice as long; and quantised by token."""
    for norm in Norm:
        for m, n, adds, strided, x in product(VLLM_TOKENS, VLLM_HIDDEN, (False, True), (False, True), FLOATS):
            yield Case(
                *("vllm", norm, (m, n), x, VLLM_INPUTS, tolerances.VLLM),
                weight=x,
                bias=x if norm is Norm.LAYER else None,
                residual=x if adds else None,
                fadd="pre_add_store" if adds else "none",
                row_stride=2 * n if strided else None,
                eps=1e-6,
            )
        for shape, adds, x, out in product(VLLM_QUANT_SHAPES, (False, True), (BF16, FP32), (INT8, E4M3FN)):
            yield Case(
                *("vllm", norm, shape, x, VLLM_INPUTS, tolerances.VLLM_QUANT),
                weight=x,
                bias=x if norm is Norm.LAYER else None,
                residual=x if adds else None,
                out=out,
                fadd="pre_add_store" if adds else "none",
                fquant="dynamic",
                eps=1e-6,
            )


def quack() -> Iterator[Case]:
    """Forward with statistics, backward, and the edges of its RMSNorm."""
    for norm in Norm:
        for m, n, x, bias in product(QUACK_M, QUACK_N, FLOATS, (None, FP32)):
            if norm is Norm.RMS and bias is not None:
                continue
            tolerance = tolerances.quack(x, m)
            yield Case("quack", norm, (m, n), x, QUACK_INPUTS, tolerance, weight=FP32, bias=bias, save_mv=True)
            yield Case("quack", norm, (m, n), x, QUACK_INPUTS, tolerance, weight=FP32, bias=bias, arriving=(Y,))
        for x in FLOATS:
            ragged = tolerances.quack(x, 3)
            yield Case("quack", norm, (3, 769), x, QUACK_RAGGED, ragged, weight=FP32, save_mv=True)
        yield from _quack_edges(norm)


def _quack_edges(norm: Norm) -> Iterator[Case]:
    bias = FP32 if norm is Norm.LAYER else None
    bf16, fp16 = tolerances.quack(BF16, 199), tolerances.quack(FP16, 32)
    view = tolerances.quack(BF16, 8 * 4096)
    if norm is Norm.RMS:
        for arriving in EACH_WAY:
            yield Case(
                *("quack", norm, (199, 1024), BF16, QUACK_INPUTS, bf16),
                weight=FP32,
                weight_offset=1.0,
                arriving=arriving,
            )
    for arriving in EACH_WAY:
        yield Case(
            *("quack", norm, (8, 4096, 512), BF16, QUACK_INPUTS, view),
            weight=FP32,
            bias=bias,
            row_stride=576,
            arriving=arriving,
        )
        for x in FLOATS:
            empty = tolerances.quack(x, 0)
            yield Case("quack", norm, (0, 1024), x, QUACK_INPUTS, empty, weight=x, bias=bias and x, arriving=arriving)
    # In PyTorch's mixed precision the gradient comes in bf16 and x is still fp32.
    for m in (37, 199):
        mixed = tolerances.quack(FP32, m)
        yield Case("quack", norm, (m, 1024), FP32, QUACK_INPUTS, mixed, weight=FP32, bias=bias, arriving=(Y,), dy=BF16)
    for arriving in EACH_GRADIENT:
        yield Case(
            *("quack", norm, (32, 1024), FP16, QUACK_INPUTS, fp16),
            weight=FP32,
            bias=bias,
            residual=FP16,
            fadd="pre_add_store",
            eps=1e-6,
            arriving=arriving,
        )
    for shape in QUACK_LARGE:
        large = tolerances.quack(BF16, shape[0])
        yield Case("quack", norm, shape, BF16, QUACK_INPUTS, large, weight=FP32, bias=bias)


def flash_attention() -> Iterator[Case]:
    """Every pair of x's and residual's dtypes with every dtype of weight, forward and through both outputs."""
    for norm, n, (x, residual), weight in product(Norm, FLASH_N, FLASH_DTYPES, FLOATS):
        yield Case(
            "flash_attention",
            norm,
            (8, 512, n),
            x,
            FLASH_INPUTS,
            tolerances.flash_attention(x, residual, weight),
            weight=weight,
            bias=weight if norm is Norm.LAYER else None,
            residual=residual,
            fadd="pre_add_store",
            eps=1e-6,
            arriving=BOTH,
        )


def liger() -> Iterator[Case]:
    """Few and short rows, mostly of odd lengths."""
    for norm, shape, x in product(Norm, LIGER_SHAPES, FLOATS):
        bias, tolerance = x if norm is Norm.LAYER else None, tolerances.liger(x, shape[0] * shape[1])
        yield Case("liger", norm, shape, x, LIGER_INPUTS, tolerance, weight=x, bias=bias, eps=1e-6, arriving=(Y,))


def flashinfer() -> Iterator[Case]:
    """RMSNorm and Gemma's, with and without a residual, and LayerNorm of bf16 with fp32 weights."""
    for m, n, x, fadd, weight_offset in product(
        FLASHINFER_BATCH, FLASHINFER_HIDDEN, (FP16, BF16), CK_TILE_FADD, (0.0, 1.0)
    ):
        yield Case(
            *("flashinfer", Norm.RMS, (m, n), x, FLASHINFER_INPUTS, tolerances.flashinfer(x)),
            weight=x,
            residual=None if fadd == "none" else x,
            fadd=fadd,
            eps=1e-6,
            weight_offset=weight_offset,
        )
    for shape in FLASHINFER_LAYER:
        tolerance = tolerances.flashinfer(BF16)
        yield Case(
            "flashinfer", Norm.LAYER, shape, BF16, FLASHINFER_INPUTS, tolerance, weight=FP32, bias=FP32, eps=1e-6
        )


def triton() -> Iterator[Case]:
    """Tutorial 05's problem, forward and backward."""
    yield Case(
        *("triton", Norm.LAYER, TUTORIAL_SHAPE, FP16, TUTORIAL_INPUTS, tolerances.TUTORIAL),
        weight=FP16,
        bias=FP16,
        arriving=(Y,),
    )

"""Shapes and modes that established suites use for the same operations, as data: (suite, problem).

ck_tile's layernorm2d and rmsnorm2d smoke tests, vLLM's layernorm and fused quantisation tests, QuACK's,
flash-attention's, Liger's and FlashInfer's, and Triton's tutorial 05.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from normforge.codegen.model import INPUT_DTYPES, Direction, DType, FusedAdd, FusedQuant, Mode, Norm

from .gradients import GradientProblem
from .problems import Problem, mixed_dtypes

FP16, BF16, FP32 = INPUT_DTYPES
INT8, FP8 = DType.INT8, DType.FP8_E4M3FN
SMOOTH, DYNAMIC = FusedQuant.SMOOTH_DYNAMIC, FusedQuant.DYNAMIC

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
CK_TILE_QUANT = ((FusedQuant.NONE, None), (SMOOTH, INT8), (SMOOTH, FP8), (DYNAMIC, INT8), (DYNAMIC, FP8))
CK_TILE_DEFAULT = (3328, 4096)

VLLM_TOKENS = (7, 83, 4096)
VLLM_HIDDEN = (8, 768, 769, 5120, 5125, 8192)
VLLM_QUANT_SHAPES = (
    *((1, n) for n in (1, 64, 128, 1024, 1025, 1027, 1029, 5120, 5137)),
    *((2048, n) for n in (1, 64, 1024, 1025, 1027, 1029, 5137)),
    *((4096, n) for n in (1, 64, 5137)),
)

QUACK_M = (1, 37, 199, 4096)
QUACK_N = (256, 512, 760, 1024, 1128, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)

FLASH_N = (192, 2048, 2560, 3000, 4096)
FLASH_DTYPES = ((FP16, FP16), (FP16, FP32), (FP32, FP32), (BF16, BF16), (BF16, FP32))

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

FLASHINFER_BATCH = (1, 19, 99, 989)
FLASHINFER_HIDDEN = (111, 500, 1024, 3072, 3584, 4096, 8192, 16384)
FLASHINFER_LAYER = tuple(product((1, 2, 3, 128), (128, 129, 1024, 16384)))

TUTORIAL_SHAPE = (1151, 8192)


def cases() -> Iterator[tuple[str, Problem]]:
    """Every problem of every suite; all for both norms where the operation has both."""
    for norm in Norm:
        yield from _ck_tile(norm)
        yield from _vllm(norm)
        yield from _quack(norm)
        yield from _flash_attention(norm)
        yield from _liger(norm)
    yield from _flashinfer()
    yield "triton", Problem(Mode(Norm.LAYER, FP16, FP16, save_mv=True), TUTORIAL_SHAPE)


def _ck_tile(norm: Norm) -> Iterator[tuple[str, Problem]]:
    for (m, n, stride), (fquant, out), dtype, fadd, save_mv in product(
        CK_TILE_SHAPES, CK_TILE_QUANT, (FP16, BF16), FusedAdd, (False, True)
    ):
        mode = Mode(norm, dtype, out or dtype, fadd, fquant, save_mv)
        yield "ck_tile", Problem(mode, (m, n), stride, dtypes={"smooth_scale": FP32}, keywords={"eps": 1e-5})
    yield "ck_tile", Problem(Mode(norm, FP16, FP16), CK_TILE_DEFAULT)


def _vllm(norm: Norm) -> Iterator[tuple[str, Problem]]:
    for m, n, fadd, strided, dtype in product(
        VLLM_TOKENS, VLLM_HIDDEN, (FusedAdd.NONE, FusedAdd.PRE_ADD_STORE), (False, True), INPUT_DTYPES
    ):
        yield "vllm", Problem(Mode(norm, dtype, dtype, fadd), (m, n), 2 * n if strided else None)
    for (m, n), dtype, out in product(VLLM_QUANT_SHAPES, (BF16, FP32), (INT8, FP8)):
        yield "vllm", Problem(Mode(norm, dtype, out, fquant=DYNAMIC), (m, n))


def _quack(norm: Norm) -> Iterator[tuple[str, Problem]]:
    for m, n, dtype, absent in product(QUACK_M, QUACK_N, INPUT_DTYPES, (frozenset({"bias"}), frozenset[str]())):
        if norm is Norm.RMS and not absent:
            continue
        mode = Mode(norm, dtype, dtype, save_mv=True)
        yield "quack", Problem(mode, (m, n), dtypes={"weight": FP32, "bias": FP32}, absent=absent)
    if norm is Norm.RMS:
        yield "quack", Problem(Mode(norm, BF16, BF16), (199, 1024), keywords={"weight_offset": 1.0})
        yield "quack", Problem(Mode(norm, BF16, BF16), (8, 4096, 512), 576)


def _flash_attention(norm: Norm) -> Iterator[tuple[str, Problem]]:
    for n, (dtype, residual), weight in product(FLASH_N, FLASH_DTYPES, INPUT_DTYPES):
        mode = Mode(norm, dtype, dtype, FusedAdd.PRE_ADD_STORE)
        dtypes = {"residual": residual, "weight": weight, "bias": weight}
        yield "flash_attention", Problem(mode, (8, 512, n), dtypes=dtypes)


def _liger(norm: Norm) -> Iterator[tuple[str, Problem]]:
    for shape, dtype in product(LIGER_SHAPES, INPUT_DTYPES):
        mode = Mode(norm, dtype, dtype)
        yield "liger", Problem(mode, shape, dtypes=mixed_dtypes(mode, shape[-1]))


def _flashinfer() -> Iterator[tuple[str, Problem]]:
    for m, n, dtype, fadd in product(FLASHINFER_BATCH, FLASHINFER_HIDDEN, (FP16, BF16), FusedAdd):
        yield "flashinfer", Problem(Mode(Norm.RMS, dtype, dtype, fadd), (m, n))
    for m, n in FLASHINFER_LAYER:
        yield "flashinfer", Problem(Mode(Norm.LAYER, BF16, BF16), (m, n), dtypes={"weight": FP32, "bias": FP32})


# The fp64 oracle of a gradient holds some ten copies of x: beyond these lengths, QuACK's 4096 rows are left to 199.
_ORACLE_LENGTH = 16384

LIGER_BACKWARD = (*LIGER_SHAPES, (2, 1024, 256))


def gradient_cases() -> Iterator[tuple[str, GradientProblem]]:
    """Every backward problem of the suites that have one, for both norms."""
    for norm in Norm:
        for m, n, dtype in product(QUACK_M, QUACK_N, INPUT_DTYPES):
            if m * n <= QUACK_M[-1] * _ORACLE_LENGTH:
                dtypes = {"weight": FP32, "bias": FP32}
                yield "quack", GradientProblem(_gradient_mode(norm, dtype), (m, n), dtypes=dtypes)
        yield "quack", GradientProblem(_gradient_mode(norm, FP32), (37, 1024), dtypes={"dy": BF16})
        yield "quack", GradientProblem(_gradient_mode(norm, BF16), (8, 4096, 512), 576)
        for n, (_, residual), weight in product(FLASH_N, FLASH_DTYPES, INPUT_DTYPES):
            mode = _gradient_mode(norm, residual, FusedAdd.PRE_ADD_STORE)
            yield "flash_attention", GradientProblem(mode, (8, 512, n), dtypes={"weight": weight, "dy": BF16})
        for shape, dtype in product(LIGER_BACKWARD, INPUT_DTYPES):
            yield "liger", GradientProblem(_gradient_mode(norm, dtype), shape)
    yield "quack", GradientProblem(_gradient_mode(Norm.RMS, BF16), (199, 1024), weight_offset=1.0)
    yield "triton", GradientProblem(_gradient_mode(Norm.LAYER, FP16), TUTORIAL_SHAPE)


def _gradient_mode(norm: Norm, dtype: DType, fadd: FusedAdd = FusedAdd.NONE) -> Mode:
    return Mode(norm, dtype, dtype, fadd, direction=Direction.BACKWARD)

"""Quantised outputs: with a residual added over row lengths, and ck_tile's default shape in its modes."""

from __future__ import annotations

from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task, rows_of
from .shapes import LARGE, OTHER_DTYPES

_LENGTHS = (1024, 2048, 4096, 5120, 8192, 16384)
# 16384×8192 and 8192×16384 have 256 MiB of x and are among those above.
_SHAPES = (*((rows_of(LARGE, n), n) for n in _LENGTHS), (16384, 4096))
_CK_TILE = (3328, 4096)

_FUSED = tuple(
    Cell(Task.ADD_QUANT, Norm.LAYER, m, n, out_dtype=out, smooth=smooth, group="add + quant")
    for smooth, out, (m, n) in product((True, False), ("int8", "fp8"), _SHAPES)
)
# Other dtypes differ in reads and not in writes: one output, of a row that is held and of one that
# is long. ck_tile's default is fp16.
_OTHERS = tuple(
    Cell(
        Task.ADD_QUANT,
        Norm.LAYER,
        rows_of(LARGE, n, dtype),
        n,
        dtype,
        out_dtype="fp8",
        smooth=True,
        group="add + quant",
    )
    for dtype, n in product(OTHER_DTYPES, (4096, 16384))
)
_PLAIN = tuple(
    Cell(task, Norm.LAYER, *_CK_TILE, dtype="fp16", group="ck_tile's default") for task in (Task.FORWARD, Task.ADD)
)
_INT8 = tuple(
    Cell(task, Norm.LAYER, *_CK_TILE, dtype="fp16", out_dtype="int8", smooth=smooth, group="ck_tile's default")
    for task, smooth in product((Task.QUANT, Task.ADD_QUANT), (True, False))
)

SUITE = Suite("quant", "Fused quantisation", Method.COLD, (*_FUSED, *_OTHERS, *_PLAIN, *_INT8))

"""Cases that the suites lack and their subject has: other types, other layouts, and every operand at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from . import tolerances
from .case import BF16, E4M3FN, E4M3FNUZ, E5M2, FP16, FP32, INT8, Case, Inputs, Norm, Tolerance, Y
from .suites import (
    BOTH,
    CK_TILE_FADD,
    CK_TILE_INPUTS,
    CK_TILE_SHAPES,
    EACH_WAY,
    FLOATS,
    QUACK_INPUTS,
    adding,
    affine,
    quantised,
)

# One length or more of each way to walk a row.
LENGTHS = (
    *(1, 7, 100, 127, 769, 1024, 1500, 3000, 4096, 4097, 4099, 5000, 5120, 6143, 6144),
    *(8191, 9216, 16384, 20000, 40000, 65537),
)
_ROWS = (3, 300)

# The types that ck_tile's list has not, over some of its shapes.
_QUANT: tuple[tuple[torch.dtype, torch.dtype, str], ...] = (
    *((out, scale, "nearest") for out, scale in product((E4M3FNUZ, E5M2), (FP32, BF16))),
    *((INT8, scale, "nearest") for scale in (FP16, BF16)),
    (INT8, FP32, "truncate"),
)


def normforge() -> Iterator[Case]:
    """All of the above."""
    for norm in Norm:
        yield from _quantised(norm)
        yield from _layouts(norm)
        yield from _lengths(norm)
        yield from _rounded_first(norm)
        yield from _beside(norm)
    yield from _groups()


def _case(
    norm: Norm, shape: tuple[int, ...], x: torch.dtype, tolerance: Tolerance, inputs: Inputs = QUACK_INPUTS, **more: Any
) -> Case:
    return Case("normforge", norm, shape, x, inputs, tolerance, **more)


def _quantised(norm: Norm) -> Iterator[Case]:
    for (m, n, stride), (out, scale, rounding), (x, fquant) in product(
        CK_TILE_SHAPES[::5], _QUANT, ((BF16, "dynamic"), (FP16, "smooth_dynamic"))
    ):
        more = affine(norm, x, FP32) | quantised(fquant, out)
        more |= {"scale": scale, "rounding": rounding, "row_stride": stride}
        yield _case(norm, (m, n), x, tolerances.CK_TILE, CK_TILE_INPUTS, **more)
    # Other libraries refused these.
    for n, out in product((8193, 10240, 20001, 65536, 262144, 1048576), (INT8, E4M3FN)):
        more = {"weight": BF16} | quantised("smooth_dynamic", out)
        yield _case(norm, (2, n), BF16, tolerances.quack(BF16, 2, BF16), **more)


def _layouts(norm: Norm) -> Iterator[Case]:
    """Rows that start anywhere, at any stride, forward and backward; and x_bias beside every other operand."""
    for n, offset, arriving, x in product((255, 3584, 8191), (1, 3, 8), EACH_WAY, (BF16, FP32)):
        more = affine(norm, FP32) | {"row_stride": n + 13, "offset": offset, "arriving": arriving}
        yield _case(norm, (19, n), x, tolerances.quack(x, 19), **more)
    for n, fadd, fquant in product((100, 769, 5120, 20000), CK_TILE_FADD, ("none", "smooth_dynamic")):
        more = affine(norm, FP16, FP32) | adding(FP32, fadd)
        if fquant != "none":
            more |= {"smooth_scale": BF16, "out": INT8, "fquant": fquant}
        more |= {"x_bias": FP32, "save_mv": True, "weight_offset": 1.0 if norm is Norm.RMS else 0.0}
        # With an offset y is up to 8, of which a rounding to bf16 is more than ck_tile allows.
        yield _case(norm, (5, n), BF16, tolerances.VLLM, CK_TILE_INPUTS, **more)


def _lengths(norm: Norm) -> Iterator[Case]:
    """Every way to walk a row, forward, backward and through a fused add, with few rows and with many, and bare."""
    for n, m, x in product(LENGTHS, _ROWS, FLOATS):
        shape, tolerance = (m, n), tolerances.quack(x, m, x)
        yield _case(norm, shape, x, tolerance, **affine(norm, x), save_mv=True)
        yield _case(norm, shape, x, tolerance, **affine(norm, x), arriving=(Y,))
        if x is BF16 and m < 10:
            for arriving in EACH_WAY:
                yield _case(norm, shape, x, tolerance, arriving=arriving)
        if x is BF16:
            more = affine(norm, FP32) | adding(FP32) | {"arriving": BOTH}
            yield _case(norm, shape, x, tolerances.quack(BF16, m), **more)


# x's type, weight's and y's: Llama's, its weight in fp32, and T5's, whose rows are fp32 and take their weight's type.
_CASTS = ((FP16, FP16, FP16), (BF16, BF16, BF16), (BF16, FP32, FP32), (FP32, BF16, BF16))
_CAST_LENGTHS = (7, 100, 769, 1500, 4096, 4099, 20000, 65537)


def _rounded_first(norm: Norm) -> Iterator[Case]:
    """Rows that are rounded before the weight, alone, with adds and quantised, and their gradients."""

    def case(m: int, n: int, x: torch.dtype, weight: torch.dtype, out: torch.dtype, **more: Any) -> Case:
        # Gradients are held to what the coarsest of these types allows.
        coarsest = BF16 if BF16 in (x, weight) else FP16
        least = out if out in FLOATS and "arriving" not in more else coarsest
        given = affine(norm, weight) | {"cast": "before_weight", "out": None if out is x else out} | more
        return _case(norm, (m, n), x, tolerances.quack(least, m, weight), **given)

    for n, m, types in product(_CAST_LENGTHS, _ROWS, _CASTS):
        yield case(m, n, *types, save_mv=True)
        yield case(m, n, *types, arriving=(Y,))
    for n, m in product(_CAST_LENGTHS, _ROWS):
        yield case(m, n, BF16, BF16, BF16, **adding(BF16))
        yield case(m, n, BF16, BF16, BF16, **adding(BF16, "pre_add"))
        yield case(m, n, BF16, BF16, BF16, **adding(FP32), arriving=BOTH)
        yield case(m, n, BF16, BF16, INT8, smooth_scale=FP32, fquant="smooth_dynamic")
        yield case(m, n, FP16, FP16, E4M3FN, **adding(FP16), fquant="dynamic")


_BESIDE_LENGTHS = (7, 100, 769, 4096, 4099, 20000)


def _beside(norm: Norm) -> Iterator[Case]:
    """Rows with a gate, behind the norm and before it, and rows of which some is dropped before an add."""
    for n, m, x in product(_BESIDE_LENGTHS, _ROWS, FLOATS):
        shape, tolerance, common = (m, n), tolerances.quack(x, m, x), affine(norm, x) | {"arriving": (Y,)}
        for activation, first in product(("silu", "sigmoid"), (False, True)):
            yield _case(norm, shape, x, tolerance, **common, gate=x, activation=activation, gate_first=first)
        yield _case(norm, shape, x, tolerance, **common, **adding(x), dropout_p=0.3)


# Elements of a group and its channels: of one program and in parts.
_GROUPS = ((104, 8), (1000, 4), (1001, 7), (4104, 2), (40960, 10), (20001, 1))


def _groups() -> Iterator[Case]:
    """GroupNorm in either layout, with SiLU and without, of few groups and many."""
    for (n, channels), samples, x, activation, last in product(
        _GROUPS, (2, 80), FLOATS, ("none", "silu"), (False, True)
    ):
        more = affine(Norm.LAYER, x) | {"activation": activation, "channels_per_group": channels}
        more |= {"channels_last": last, "arriving": (Y,)}
        yield _case(Norm.LAYER, (samples, 4, n), x, tolerances.quack(x, samples * n, x), **more)

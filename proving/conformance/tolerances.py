"""Define the tolerances of each suite, by dtype."""

from __future__ import annotations

import math

import torch

from .case import BF16, FP16, FP32, Close, Tolerance

CK_TILE = TUTORIAL = Tolerance(y=Close(1e-2), dx=Close(1e-2), parameters=Close(1e-2))
# vLLM compares scales of its fused quantisation to 1e-6.
VLLM = Tolerance(y=Close(1e-2, 1e-2))
VLLM_QUANT = Tolerance(y=Close(1e-2, 1e-2), y_scale=Close(0.0, 1e-6))

_QUACK_FORWARD = {BF16: 1e-2, FP16: 1e-3, FP32: 1e-4}
_QUACK_BACKWARD = {BF16: 2e-2, FP16: 5e-3, FP32: 1e-4}
_QUACK_PARAMETERS = {BF16: 1e-3, FP16: 1e-3, FP32: 5e-6}
_QUACK_STATISTICS = 6e-4


def quack(dtype: torch.dtype, rows: int, weight: torch.dtype = FP32) -> Tolerance:
    """Return the bound of weight's gradient: a sum over rows is off by about √M as much as one row's."""
    forward, backward = _QUACK_FORWARD[dtype], _QUACK_BACKWARD[dtype]
    # Its weights are fp32, so that nothing but the sum is rounded.
    rounding = 1e-3 if weight is FP32 else _QUACK_FORWARD[weight]
    rounding = 1e-5 if dtype is FP32 else rounding
    return Tolerance(
        y=Close(forward, forward),
        dx=Close(backward, backward),
        parameters=Close(_QUACK_PARAMETERS[dtype] * math.sqrt(rows), rounding),
        statistics=Close(_QUACK_STATISTICS),
    )


def liger(dtype: torch.dtype, rows: int) -> Tolerance:
    """Its own 1e-5 for fp32; what it does not test in 16 bits is held to QuACK's."""
    if dtype is not FP32:
        return quack(dtype, rows, dtype)
    close = Close(1e-5, 1e-5)
    return Tolerance(y=close, dx=close, parameters=close)


def flash_attention(*dtypes: torch.dtype) -> Tolerance:
    """Return less than twice the error of torch's operator and an atol, the suite's rule: the atol and one rounding."""
    coarsest = next(dtype for dtype in (BF16, FP16, FP32) if dtype in dtypes)
    close = Close({BF16: 5e-2, FP16: 1e-2, FP32: 1e-4}[coarsest], torch.finfo(coarsest).eps / 2)
    return Tolerance(y=close, dx=close, parameters=close)


def flashinfer(dtype: torch.dtype) -> Tolerance:
    """1e-3 in fp16; of bf16 a rounding alone is up to 4e-3 of the value."""
    close = 1e-3 if dtype is FP16 else 1e-2
    return Tolerance(y=Close(close, close))

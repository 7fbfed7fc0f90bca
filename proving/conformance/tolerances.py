"""Define the tolerances of each suite, by what a case is of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from .case import BF16, FP16, FP32, Case, Close, Tolerance

CK_TILE = Tolerance(y=Close(1e-2), dx=Close(1e-2), parameters=Close(1e-2))

_QUACK_FORWARD = {BF16: 1e-2, FP16: 1e-3, FP32: 1e-4}
_QUACK_BACKWARD = {BF16: 2e-2, FP16: 5e-3, FP32: 1e-4}
_QUACK_PARAMETERS = {BF16: 1e-3, FP16: 1e-3, FP32: 5e-6}
_QUACK_STATISTICS = 6e-4


def _coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    return next(dtype for dtype in (BF16, FP16, FP32) if dtype in dtypes)


def quack(case: Case) -> Tolerance:
    """Return the bound of weight's gradient: a sum over rows is off by about √M as much as one row's."""
    dtype, weight = case.x, case.weight or FP32
    if case.cast == "before_weight":
        # Gradients are held to what the coarsest of these types allows.
        dtype = case.y if case.y in _QUACK_FORWARD and not case.arriving else _coarsest(case.x, case.weight)
    rows = case.shape[0] * case.n if case.channels_per_group else case.rows
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


def _liger(case: Case) -> Tolerance:
    """Its own 1e-5 for fp32; what it does not test in 16 bits is held to QuACK's."""
    if case.x is not FP32:
        return quack(case)
    close = Close(1e-5, 1e-5)
    return Tolerance(y=close, dx=close, parameters=close)


def _flash_attention(case: Case) -> Tolerance:
    """Return less than twice the error of torch's operator and an atol, the suite's rule: the atol and one rounding."""
    coarsest = _coarsest(case.x, case.residual, case.weight)
    close = Close({BF16: 5e-2, FP16: 1e-2, FP32: 1e-4}[coarsest], torch.finfo(coarsest).eps / 2)
    return Tolerance(y=close, dx=close, parameters=close)


def _flashinfer(case: Case) -> Tolerance:
    """1e-3 in fp16; of bf16 a rounding alone is up to 4e-3 of the value."""
    close = 1e-3 if case.x is FP16 else 1e-2
    return Tolerance(y=Close(close, close))


# By the names of `suites.yaml`.
TOLERANCES: Mapping[str, Callable[[Case], Tolerance]] = {
    "ck_tile": lambda case: CK_TILE,
    "tutorial": lambda case: CK_TILE,
    "vllm": lambda case: Tolerance(y=Close(1e-2, 1e-2)),
    # vLLM compares scales of its fused quantisation to 1e-6.
    "vllm_quant": lambda case: Tolerance(y=Close(1e-2, 1e-2), y_scale=Close(0.0, 1e-6)),
    "quack": quack,
    "liger": _liger,
    "flash_attention": _flash_attention,
    "flashinfer": _flashinfer,
}

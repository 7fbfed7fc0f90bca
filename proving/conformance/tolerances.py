"""Define the tolerances of each suite, by what a case is of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from normforge.tools.compare import Tolerance as Close

from .case import BF16, FP16, FP32, Case


class Tolerance(NamedTuple):
    """The tolerance of a suite.

    Quantised y may always be off by one step, int8 in at most 0.1 % of elements, and residual_out by nothing.

    Attributes:
        y: y that is not quantised.
        dx: gradients of x and residual.
        parameters: gradients of weight and bias.
        y_scale: the scale of a quantised row, beside the scale.
    """

    y: Close
    dx: Close
    parameters: Close
    y_scale: float = 1e-5


# Of mean and rstd.
QUACK_STATISTICS = Close(6e-4, 0.0)

_QUACK_FORWARD = {BF16: 1e-2, FP16: 1e-3, FP32: 1e-4}
_QUACK_BACKWARD = {BF16: 2e-2, FP16: 5e-3, FP32: 1e-4}
_QUACK_PARAMETERS = {BF16: 1e-3, FP16: 1e-3, FP32: 5e-6}


def _coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    return next(dtype for dtype in (BF16, FP16, FP32) if dtype in dtypes)


def _quack(case: Case) -> Tolerance:
    """Return the bound of weight's gradient: a sum over rows is off by about √M as much as one row's."""
    dtype, weight = case.x, case.weight or FP32
    if case.cast == "before_weight":
        # Gradients are held to what the coarsest of these types allows.
        dtype = case.y if case.y in _QUACK_FORWARD and not case.arriving else _coarsest(case.x, case.weight)
    rows = case.shape[0] * case.n if case.channels_per_group else case.rows
    forward, backward = _QUACK_FORWARD[dtype], _QUACK_BACKWARD[dtype]
    # Its weights are fp32, so that nothing but the sum is rounded.
    rounding = 1e-5 if dtype is FP32 else 1e-3 if weight is FP32 else _QUACK_FORWARD[weight]
    each = _QUACK_PARAMETERS[dtype]
    if case.family == "renormed":
        # The second norm reads a rounded sum, and the first a rounded gradient of it.
        forward, each, rounding = 2 * forward, backward, backward
    parameters = Close(each * math.sqrt(rows), rounding)
    return Tolerance(Close(forward, forward), Close(backward, backward), parameters)


def _all(atol: float, rtol: float) -> Tolerance:
    return Tolerance(*(Close(atol, rtol),) * 3)


def _liger(case: Case) -> Tolerance:
    """Its own 1e-5 for fp32; what it does not test in 16 bits is held to QuACK's."""
    return _all(1e-5, 1e-5) if case.x is FP32 else _quack(case)


def _flash_attention(case: Case) -> Tolerance:
    """Return less than twice the error of torch's operator and an atol, the suite's rule: the atol and one rounding."""
    coarsest = _coarsest(case.x, case.residual, case.weight)
    return _all({BF16: 5e-2, FP16: 1e-2, FP32: 1e-4}[coarsest], torch.finfo(coarsest).eps / 2)


# By the names of `suites.yaml`.
TOLERANCES: Mapping[str, Callable[[Case], Tolerance]] = {
    "ck_tile": lambda case: _all(1e-2, 0.0),
    "tutorial": lambda case: _all(1e-2, 0.0),
    "vllm": lambda case: _all(1e-2, 1e-2),
    # vLLM compares scales of its fused quantisation to 1e-6.
    "vllm_quant": lambda case: _all(1e-2, 1e-2)._replace(y_scale=1e-6),
    "quack": _quack,
    "liger": _liger,
    "flash_attention": _flash_attention,
    # 1e-3 in fp16; of bf16 a rounding alone is up to 4e-3 of the value.
    "flashinfer": lambda case: _all(1e-3, 1e-3) if case.x is FP16 else _all(1e-2, 1e-2),
}

"""Kernels launched on the CPU without the runtime, and what they return against the fp64 oracle."""

from __future__ import annotations

from typing import Any

import torch

from normforge import LayerNormOutput, reference
from normforge.codegen.model import Mode
from normforge.compare import compare, compare_gradients
from normforge.output import NormGradients

EPS = 1e-5
# RMSNorm's weight_offset.
OFFSET = 0.5
_ALIKE: dict[str, Any] = {
    "eps": EPS,
    "weight_offset": OFFSET,
    "ROW_ALIGNMENT": 1,
    "AHEAD": 1,
    "PAIRED": False,
    "PTX": False,
    "PDL": False,
}


def run(kernel: Any, grid: tuple[int, ...], values: dict[str, Any]) -> None:
    """Launch a kernel; values are matched with parameters by name, and one that there is no value for is None."""
    kernel[grid](*[(_ALIKE | values).get(name) for name in kernel.arg_names])


def outputs(mode: Mode, y: torch.Tensor, statistics: dict[str, torch.Tensor]) -> LayerNormOutput:
    """What a forward call of a mode would return, of tensors that a kernel was handed."""
    mean, rstd = statistics["mean"], statistics["rstd"]
    return LayerNormOutput(
        y, None, None, mean if mode.save_mv and mode.norm.centres else None, rstd if mode.save_mv else None
    )


def check_forward(actual: LayerNormOutput, mode: Mode, x: torch.Tensor, vectors: dict[str, Any]) -> None:
    """Hold every output against the oracle's."""
    if mode.norm.centres:
        expected = reference.layernorm2d_fwd(x, **vectors, eps=EPS, save_mv=mode.save_mv)
    else:
        expected = reference.rmsnorm2d_fwd(x, **vectors, eps=EPS, weight_offset=OFFSET, save_mv=mode.save_mv)
    findings = compare(actual, expected)
    assert all(finding.ok for finding in findings), findings


def check_gradients(actual: NormGradients, mode: Mode, operands: dict[str, Any]) -> None:
    """Hold every gradient there is against the oracle's."""
    if mode.norm.centres:
        expected = reference.layernorm2d_bwd(**operands)
    else:
        expected = reference.rmsnorm2d_bwd(**operands, weight_offset=OFFSET)
    findings = compare_gradients(actual, expected)
    assert len(findings) == sum(gradient is not None for gradient in actual)
    assert all(finding.ok for finding in findings), findings

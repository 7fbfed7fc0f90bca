"""Kernels launched on the CPU without the runtime, and what they return against the fp64 oracle."""

from __future__ import annotations

from typing import Any

import torch

from normforge import LayerNormOutput, reference
from normforge.calls.outputs import NormGradients
from normforge.codegen.model import Mode
from normforge.dtypes import TORCH_DTYPES
from normforge.tools.compare import compare, compare_gradients

EPS = 1e-5
# RMSNorm's weight_offset.
OFFSET = 0.5
_ALIKE: dict[str, Any] = {
    "eps": EPS,
    "weight_offset": OFFSET,
    "ROW_ALIGNMENT": 1,
    "STAGES": 1,
    "PAIRED": False,
    "PTX": False,
    "PDL": False,
}


def run(kernel: Any, grid: tuple[int, ...], values: dict[str, Any]) -> None:
    """Launch a kernel; values are matched with parameters by name, and one that there is no value for is None."""
    kernel[grid](*[(_ALIKE | values).get(name) for name in kernel.arg_names])


def saved(mode: Mode, x: torch.Tensor, x_bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The statistics that a forward call would have saved."""
    of = reference.FORWARD[mode.norm](x, x_bias=x_bias, eps=EPS, save_mv=True)
    return {name: each for name, each in (("mean", of.mean), ("rstd", of.rstd)) if each is not None}


def run_backward(
    kernel: Any, grid: tuple[int, ...], mode: Mode, given: dict[str, torch.Tensor], values: dict[str, Any]
) -> NormGradients:
    """Launch a backward kernel whose grid ends in the programs that share the rows, and add up what they leave.

    Args:
        kernel: the `triton.JITFunction`.
        grid: programs in each dimension.
        mode: the kernel's.
        given: its operands by name, statistics and memory for an exchange among them; dx only where it is wanted.
        values: constants.
    """
    m, n = given["x"].shape
    names = ["dweight", *(["dbias"] if mode.norm.centres else []), *(["dx_bias"] if mode.x_bias else [])]
    partials = {name: torch.full((grid[-1], n), float("nan")) for name in names}
    tensors = given | partials
    pointers = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    strides = {f"{name}_row_stride": tensor.stride(0) for name, tensor in tensors.items() if tensor.dim() == 2}
    run(kernel, grid, {"dx_row_stride": n, "M": m, "N": n} | pointers | strides | values)
    sums = {name: partial.sum(0) for name, partial in partials.items()}
    return NormGradients(given.get("dx"), sums.get("dweight"), sums.get("dbias"), sums.get("dx_bias"))


def run_forward(
    kernel: Any, grid: tuple[int, ...], mode: Mode, given: dict[str, torch.Tensor], values: dict[str, Any]
) -> LayerNormOutput:
    """Launch a forward kernel on tensors by name, x among them; y and what is kept of rows begin as NaN.

    Args:
        kernel: the `triton.JITFunction`.
        grid: programs in each dimension.
        mode: the kernel's.
        given: its operands by name, memory for an exchange among them, and where y and residual_out are to lie.
        values: constants.
    """
    m, n = given["x"].shape
    out = TORCH_DTYPES[mode.dtype_out]
    y = given.get("y", torch.full((m, n * out.itemsize), 0xFF, dtype=torch.uint8).view(out))
    kept = {name: torch.full((m,), float("nan")) for name in ("mean", "rstd", "y_scale")}
    # What is encoded is stored as bytes.
    tensors = kept | given | {"y": y.view(torch.uint8) if mode.dtype_out.is_fp8 else y}
    pointers = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    strides = {f"{name}_row_stride": tensor.stride(0) for name, tensor in tensors.items() if tensor.dim() == 2}
    run(kernel, grid, {"row_stride": given["x"].stride(0), "M": m, "N": n} | pointers | strides | values)
    return LayerNormOutput(
        y,
        given.get("residual_out"),
        kept["y_scale"] if mode.fquant.quantises else None,
        kept["mean"] if mode.save_mv and mode.norm.centres else None,
        kept["rstd"] if mode.save_mv else None,
    )


def check_forward(actual: LayerNormOutput, mode: Mode, x: torch.Tensor, vectors: dict[str, Any]) -> None:
    """Hold every output against the oracle's."""
    asked: dict[str, Any] = {"eps": EPS, "save_mv": mode.save_mv, "cast": mode.cast}
    asked |= {"fadd": mode.fadd, "fquant": mode.fquant, "out_dtype": TORCH_DTYPES[mode.dtype_out]}
    asked |= {} if mode.norm.centres else {"weight_offset": OFFSET}
    expected = reference.FORWARD[mode.norm](x, **vectors, **asked)
    findings = compare(actual, expected)
    assert all(finding.ok for finding in findings), findings


def check_gradients(actual: NormGradients, mode: Mode, operands: dict[str, Any]) -> None:
    """Hold every gradient there is against the oracle's."""
    asked: dict[str, Any] = {} if mode.norm.centres else {"weight_offset": OFFSET}
    expected = reference.BACKWARD[mode.norm](**operands, **asked, cast=mode.cast)
    findings = compare_gradients(actual, expected)
    assert len(findings) == sum(gradient is not None for gradient in actual)
    assert all(finding.ok for finding in findings), findings

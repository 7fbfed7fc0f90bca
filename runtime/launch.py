"""Allocates what a call returns and launches its kernel."""

from __future__ import annotations

from functools import cache

import torch

from . import dispatch
from .arguments import Call, row_stride
from .codegen.model import DType
from .dtypes import TORCH_DTYPES
from .kernels import interpreting, launch, require_device
from .output import LayerNormOutput
from .table import Entry


def run(call: Call) -> LayerNormOutput:
    """Launch the instance that serves a call.

    Raises:
        DeviceError: no kernel can run on x's device.
        MissingInstanceError: nothing serves the call and nothing may be generated.
    """
    require_device(call.x)
    entry = dispatch.find(call.mode, call.n)
    kernel = entry.load()
    outputs = _allocate(call)
    if call.m:
        launch(kernel, (-(-call.m // entry.rows),), _values(call, entry, outputs), entry.warps, call.x)
    return outputs


def _allocate(call: Call) -> LayerNormOutput:
    mode, x = call.mode, call.x
    rows = x.shape[:-1]

    def per_row(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, dtype=dtype, device=x.device)

    def per_element(given: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(x.shape, dtype=dtype, device=x.device) if given is None else given

    return LayerNormOutput(
        y=per_element(call.out, TORCH_DTYPES[mode.dtype_out]),
        residual_out=(
            per_element(call.residual_out, call.residual.dtype)
            if mode.fadd.stores and call.residual is not None
            else None
        ),
        y_scale=per_row(TORCH_DTYPES[mode.scale_dtype]) if mode.fquant.quantises else None,
        mean=per_row(torch.float32) if mode.save_mv and mode.norm.centres else None,
        rstd=per_row(torch.float32) if mode.save_mv else None,
    )


def _values(call: Call, entry: Entry, outputs: LayerNormOutput) -> dict[str, object]:
    """Everything a kernel may name as a parameter."""
    y = outputs.y
    if _encodes_in_software(call.mode.dtype_out, call.x):
        y = y.view(torch.uint8)
    return {
        "x_ptr": call.x,
        "x_bias_ptr": call.x_bias,
        "residual_ptr": call.residual,
        "weight_ptr": call.weight,
        "bias_ptr": call.bias,
        "smooth_scale_ptr": call.smooth_scale,
        "y_ptr": y,
        "residual_out_ptr": outputs.residual_out,
        "y_scale_ptr": outputs.y_scale,
        "mean_ptr": outputs.mean,
        "rstd_ptr": outputs.rstd,
        "x_row_stride": call.x_row_stride,
        "residual_row_stride": call.residual_row_stride,
        "y_row_stride": row_stride("out", y),
        "residual_out_row_stride": (
            0 if outputs.residual_out is None else row_stride("residual_out", outputs.residual_out)
        ),
        "M": call.m,
        "eps": call.eps,
        "weight_offset": call.weight_offset,
        "N": call.n,
        "ROWS": entry.rows,
        "BLOCK": entry.block,
    }


# Formats that NVIDIA hardware of compute capability 8.9 and up converts to in one rounding. Everywhere else, and in
# the interpreter, kernels are handed bytes and encode in integer arithmetic.
_HARDWARE_FP8 = (DType.FP8_E4M3FN, DType.FP8_E5M2)


def _encodes_in_software(dtype: DType, x: torch.Tensor) -> bool:
    if not dtype.is_quantised or dtype.is_int:
        return False
    return not (dtype in _HARDWARE_FP8 and x.is_cuda and _converts_to_fp8(x.device))


@cache
def _converts_to_fp8(device: torch.device) -> bool:
    if torch.version.hip is not None or interpreting():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)

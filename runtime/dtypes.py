"""The one mapping between torch's dtypes and the manifest's words."""

from __future__ import annotations

import torch

from .codegen.values import FP8_INPUT_DTYPES, DType, ScaleFormat

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FP16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.FP32: torch.float32,
    DType.INT8: torch.int8,
    DType.FP8_E4M3FN: torch.float8_e4m3fn,
    DType.FP8_E4M3FNUZ: torch.float8_e4m3fnuz,
    DType.FP8_E5M2: torch.float8_e5m2,
    DType.FP4_E2M1FN: torch.float4_e2m1fn_x2,
}

# What scales of groups are stored in.
SCALE_DTYPES: dict[ScaleFormat, torch.dtype] = {
    ScaleFormat.FLOAT: torch.float32,
    ScaleFormat.UE8M0_FLOAT: torch.float32,
    ScaleFormat.UE8M0: torch.float8_e8m0fnu,
    ScaleFormat.UE8M0_PACKED: torch.int32,
    ScaleFormat.E4M3: torch.float8_e4m3fn,
}

DTYPES: dict[torch.dtype, DType] = {value: key for key, value in TORCH_DTYPES.items()}

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# What x may be besides, with an x_scale, in forward calls.
FP8_INPUTS = tuple(TORCH_DTYPES[dtype] for dtype in FP8_INPUT_DTYPES)


def stored_dtype(kind: DType | ScaleFormat) -> torch.dtype:
    """What stands in memory of a type that a mode names."""
    return SCALE_DTYPES[kind] if isinstance(kind, ScaleFormat) else TORCH_DTYPES[kind]

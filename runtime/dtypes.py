"""From torch's dtypes, words and integers that callers pass to the fields of a mode, and from a mode to arguments."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import torch

from .codegen import groups, values
from .codegen.families import Kind, Parameter
from .codegen.model import Mode
from .codegen.parameters import family_of
from .codegen.values import DY_GROUPS, FP8_INPUT_DTYPES, Cast, DType, ScaleFormat
from .errors import ConflictError

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

# Dtypes of the scales of groups, too.
STORED_DTYPES: dict[Any, torch.dtype] = {
    **TORCH_DTYPES,
    ScaleFormat.FLOAT: torch.float32,
    ScaleFormat.UE8M0_FLOAT: torch.float32,
    ScaleFormat.UE8M0: torch.float8_e8m0fnu,
    ScaleFormat.UE8M0_PACKED: torch.int32,
    ScaleFormat.E4M3: torch.float8_e4m3fn,
}

DTYPES: dict[torch.dtype, DType] = {value: key for key, value in TORCH_DTYPES.items()}

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Further dtypes of x in forward calls that pass an x_scale.
FP8_INPUTS = tuple(TORCH_DTYPES[dtype] for dtype in FP8_INPUT_DTYPES)


E = TypeVar("E", bound=Enum)

# Members by accepted argument: TorchDynamo traces a look-up here, where torch 2.11's cannot go through an enum.
_ENUMS: list[Any] = [each for each in (*vars(values).values(), groups.Activation) if isinstance(each, type(Enum))]
_MEMBERS: dict[type[Enum], dict[Any, Any]] = {
    kind: {key: member for member in kind for key in (member.value, getattr(member, "code", member.value))}
    for kind in _ENUMS
}


def word(kind: type[E], argument: str, value: object) -> E:
    """Return the member of `kind` for a member, its word, or its integer: ck_tile's, or a size.

    Raises:
        ConflictError: the value is none of them.
    """
    if isinstance(value, kind):
        return value
    members = _MEMBERS[kind]
    # No bool, although True == 1.
    member: E | None = members.get(value) if isinstance(value, str) or type(value) is int else None
    if member is None:
        codes = {each.value: f" ({each.code})" if hasattr(each, "code") else "" for each in members.values()}
        known = ", ".join(f"{each!r}{code}" for each, code in codes.items())
        raise ConflictError(f"{argument}={value!r} is no mode; it takes {known}")
    return member


# An example of a number other than 0: the probability of a dropout.
_NUMBER = 0.25


def arguments_of(mode: Mode, make: Callable[[Parameter], torch.Tensor | None]) -> dict[str, Any]:
    """Return the arguments of a call of a mode by name: its words, flags and dtypes, and the tensors the mode reads.

    Numbers keep their defaults, unless the mode says that there is one, and outputs are allocated.

    Args:
        mode: what is to be called.
        make: makes a tensor that the mode reads; None leaves it out, where it may be.
    """
    arguments: dict[str, Any] = {}
    for parameter in family_of(mode).of(mode.norm):
        if parameter.kind is Kind.OUT or not parameter.is_wanted(mode):
            continue
        if parameter.kind.is_tensor:
            arguments[parameter.name] = make(parameter)
        elif parameter.kind is Kind.NUMBER and parameter.wanted:
            arguments[parameter.name] = _NUMBER
        elif parameter.axis:
            value = getattr(mode, parameter.axis)
            arguments[parameter.name] = TORCH_DTYPES[value] if parameter.kind is Kind.DTYPE else value
    return arguments


def dequantised(rows: Any, scale: torch.Tensor | None) -> Any:
    """Return rows of fp8 times their scales, one per row, per group or for all, in fp32; other rows without a scale."""
    if scale is None:
        return rows
    *leading, n = rows.shape
    shape = (1,) if scale.numel() == 1 else (*leading, scale.shape[-1] if scale.dim() == rows.dim() else 1)
    size = next(size for size in (n, *DY_GROUPS) if shape[-1] == -(-n // size))
    return rows.float() * scale.float().reshape(shape).repeat_interleave(size, -1)[..., :n]


def rounded_to(cast: Cast, y_dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype | None:
    """Return the 16-bit dtype that rows are rounded to before the weight: y's (or dy's), else x's; None for neither."""
    return next((dtype for dtype in (y_dtype, x_dtype) if cast.comes_first and dtype in HALVES), None)

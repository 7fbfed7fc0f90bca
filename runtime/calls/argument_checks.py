"""One argument, checked: that it is a tensor of a type, shape, device and layout that kernels take, or a number.

Each names the argument, what was passed and what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, SupportsFloat, TypeGuard

import torch

from ..codegen.families import Kind
from ..dtypes import DTYPES, FLOATS, FP8_INPUTS
from ..errors import ConflictError, DeviceError, DTypeError, GradientError, LayoutError, ShapeError, TransformError
from ..kernels.strides import RowWalk, strides_of
from ..upstream.torch_internals import constant_in_traces, has_tangent, is_transformed, jit_tracing, transforming
from .overlap import REPLACEABLE, rows_overlap, spoils
from .row_layout import row_stride

# Kernels take numbers as fp32; anything larger would arrive there as infinity.
LARGEST_FP32 = torch.finfo(torch.float32).max


def check_x(x: torch.Tensor, *, scaled: bool) -> int:
    """Check what is normalised, and return N; if `scaled`, it may be fp8, with a scale of its own."""
    check_tensor("x", x)
    if jit_tracing():
        raise TransformError(
            "torch.jit.trace records no kernel; record with torch.export or torch.compile, which do, "
            "or call normforge.layer_norm or rms_norm, which run torch's own operator there"
        )
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(f"x has shape {tuple(x.shape)}; it takes (..., N) with N >= 1")
    if not scaled:
        refuse_fp8(x, "which has no gradient")
    check_dtype("x", x, (*FLOATS, *FP8_INPUTS) if scaled else FLOATS)
    if x.is_meta:
        raise DeviceError("x is on meta, where tensors hold no data; it takes a tensor on a GPU")
    return x.shape[-1]


def refuse_fp8(x: torch.Tensor, reason: str) -> None:
    """Refuse an fp8 x where there is no kernel that takes one.

    Raises:
        DTypeError: it is one.
    """
    if _is_fp8(x.dtype):
        raise DTypeError(f"x has dtype {x.dtype}, {reason}; pass the dequantised x, (x.float() * x_scale).bfloat16()")


@constant_in_traces
def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype in FP8_INPUTS


# The operands that are fp32; all others may have any type of `FLOATS`.
_IN_FP32 = (Kind.SCALE, Kind.VALUE, Kind.PER_ROW)

# How an error about a shape ends, to be formatted with the shapes that `_shapes` returns.
_TAKES: Mapping[Kind, str] = {
    Kind.ROWS: "; it takes x's, {0}",
    Kind.VECTOR: "; it takes {0}, the last dimension of x",
    Kind.PER_ROW: "; it takes one value a row, {0}",
    Kind.SCALE: "; it takes one value a row, {0} or {1}, or one for all, (1,)",
    Kind.VALUE: "; it takes one value, (1,)",
    Kind.SAMPLES: " and x {x}; it takes {shapes}: one for each sample (x's first dimension), for each row, or for all",
    Kind.GROUPS: " and x {x}; it takes {shapes}: one for all rows, or for each group",
}


def check_operand(
    kind: Kind, name: str, tensor: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = ()
) -> None:
    """Check an operand or output of x, whose values are not read; `dtypes` are those of its kind by default."""
    # Statistics come from a forward call, so that a wrong one is most likely another result of the call.
    if kind is Kind.PER_ROW and not (isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32):
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise DTypeError(f"{name} is {got}; it takes the torch.float32 tensor that the forward call saved")
    check_tensor(name, tensor)
    check_shape(kind, name, tensor, x)
    check_dtype(name, tensor, dtypes or ((torch.float32,) if kind in _IN_FP32 else FLOATS))
    check_device(name, tensor, x)
    if kind in (Kind.ROWS, Kind.SAMPLES, Kind.GROUPS):
        row_stride(name, tensor)
    elif kind is Kind.VECTOR and not tensor.is_contiguous():
        raise LayoutError(f"{name} has stride {tensor.stride(0)} and kernels need 1; pass {name}.contiguous()")
    else:
        check_contiguous(name, tensor)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is contiguous."""
    if not tensor.is_contiguous():
        raise LayoutError(f"{name} has strides {tensor.stride()}; pass {name}.contiguous()")


def check_shape(kind: Kind, name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """Check the shape of an operand or output of x."""
    shapes = _shapes(kind, x)
    # Compares ranks first: tuples compare sizes first, and a traced call would guard on a dynamic one. Compares shapes
    # before the number of elements, which may depend on data.
    fits = any(tensor.dim() == len(shape) and tuple(tensor.shape) == shape for shape in shapes)
    if fits or (kind in (Kind.SCALE, Kind.VALUE) and tensor.numel() == 1):
        return
    takes = _TAKES[kind].format(*shapes, x=tuple(x.shape), shapes=" or ".join(map(str, shapes)))
    raise ShapeError(f"{name} has shape {tuple(tensor.shape)}{takes}")


def _shapes(kind: Kind, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes that an operand may have, but for a single element's."""
    whole, leading, vector = tuple(x.shape), tuple(x.shape[:-1]), tuple(x.shape[-1:])
    # TorchDynamo follows the first two for operands of `check_normalised`, whose kinds it could guard no further.
    if kind is Kind.SAMPLES:
        return [(*whole[:1], *vector), whole, vector] if x.dim() > 2 else [whole, vector]
    if kind is Kind.GROUPS:
        return [vector, tuple(x.shape[-2:])]
    if kind is Kind.ROWS:
        return [whole]
    if kind is Kind.PER_ROW:
        return [leading]
    if kind is Kind.SCALE:
        return [leading, (*leading, 1)]
    return [vector] if kind is Kind.VECTOR else []


def check_output(
    name: str,
    output: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    others: dict[str, torch.Tensor],
    addressed: bool,
) -> None:
    """Check rows that are written to, and if they have addresses that they meet no other tensor."""
    check_operand(Kind.ROWS, name, output, x, (dtype,))
    check_written(name, output, addressed)
    stride = row_stride(name, output)
    overlap = rows_overlap(output) if isinstance(stride, RowWalk) else stride < x.shape[-1] < output.numel()
    if overlap:
        strides = ", ".join(map(str, strides_of(stride)))
        raise LayoutError(f"the rows of {name} overlap (row stride {strides}, N {x.shape[-1]}); pass rows of their own")
    for other_name, other in others.items():
        may_replace = other_name in REPLACEABLE
        if spoils(output, other, may_replace):
            exact = " (the very same view would do)" if may_replace and output.dtype == other.dtype else ""
            raise LayoutError(f"{name} overlaps {other_name} in memory{exact}; pass memory of its own")


def check_written(name: str, output: torch.Tensor, addressed: bool) -> None:
    """Check that a tensor may be written to, as far as autograd and torch's views have a say."""
    if addressed:
        refuse_transformed(**{name: output})
    check_no_gradient("what is written to it has none", **{name: output})
    # In a trace, torch asks the rest itself.
    if not addressed:
        return
    if output.is_neg():
        raise LayoutError(f"{name} is a view that negates its memory (torch.Tensor.is_neg); pass memory of its own")
    if output.is_inference() and not torch.is_inference_mode_enabled():
        raise GradientError(
            f"{name} is an inference tensor, which is written to under torch.inference_mode() alone; "
            f"call under that, or pass {name}.clone()"
        )


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Check that an argument is a tensor, and return it."""
    if isinstance(value, torch.fx.Proxy):
        raise TransformError(
            f"{name} is a {type(value).__name__}, and torch.fx.symbolic_trace records no kernel; call {_FOLLOWED}, "
            "which it records as one call, or record with torch.export or make_fx"
        )
    if not isinstance(value, torch.Tensor):
        raise DTypeError(f"{name} is a {type(value).__name__}; it takes a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"in layout {value.layout}"
        raise LayoutError(f"{name} is {kind}; it takes a dense tensor (torch.strided)")
    return value


# Transforms of torch can follow these functions.
_FOLLOWED = "normforge.layer_norm, rms_norm or another differentiable function"


def refuse_transformed(**args: object) -> None:
    """Refuse tensors that a transform of torch.func wraps, which no kernel can read or write.

    Raises:
        TransformError: there is one.
    """
    if not transforming():
        return
    for name, value in args.items():
        if isinstance(value, torch.Tensor) and is_transformed(value):
            raise TransformError(
                f"{name} is wrapped by a transform of torch.func (vmap, grad, jvp, functionalize), which follows no "
                f"kernel; call {_FOLLOWED}, which run torch's own operators there, or make this call outside the "
                "transform"
            )


def check_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that a tensor is of one of some types."""
    if tensor.dtype not in dtypes:
        raise DTypeError(f"{name} has dtype {tensor.dtype}; it takes {' or '.join(map(str, dtypes))}")


def check_device(name: str, tensor: torch.Tensor, x: torch.Tensor, its_name: str = "x") -> None:
    """Check that an operand is on x's device."""
    if tensor.device != x.device:
        raise DeviceError(f"{name} is on {tensor.device} and {its_name} on {x.device}; move one to the other's device")


def check_result_dtype(name: str, dtype: object, *, is_gradient: bool) -> None:
    """Check the dtype that a result is to have: one that kernels are made for, and a float of a gradient."""
    if not isinstance(dtype, torch.dtype) or dtype not in (FLOATS if is_gradient else DTYPES):
        takes = " or ".join(map(str, FLOATS)) if is_gradient else f"one of {', '.join(map(str, DTYPES))}"
        raise DTypeError(f"{name} is {dtype!r}; it takes {takes}")


def check_flag(name: str, value: object) -> bool:
    """Check that an argument is True or False, and return it."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ConflictError(f"{name}={value!r} is no flag; it takes True or False")
    return bool(value)


def check_number(name: str, value: object, *, least: float, most: float = math.inf) -> float:
    """Check that an argument is a number of at least `least` that fp32 can hold, at most `most`, and return it."""
    smallest, largest, number = max(least, -LARGEST_FP32), min(most, LARGEST_FP32), value
    if not isinstance(number, (int, float)) and _is_number(number):
        number = float(number)
    # The comparison also fails for NaN.
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not smallest <= number <= largest:
        if most < math.inf:
            raise ConflictError(f"{name}={value!r} will not do; it takes a number from {least:g} to at most {most!r}")
        at_least = f" of at least {least:g}" if math.isfinite(least) else ""
        raise ConflictError(f"{name}={value!r} will not do; it takes a number{at_least} that is finite in fp32")
    return float(number)


def _is_number(value: Any) -> TypeGuard[SupportsFloat]:
    """Return True if torch takes a value as a number: NumPy's scalars, and tensors of no dimensions, but for bools."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not (value.requires_grad or value.is_complex() or value.dtype is torch.bool)
    return isinstance(value, Real)


def check_no_gradient(reason: str, **tensors: torch.Tensor | None) -> None:
    """Check that no tensor requires a gradient while gradients are enabled, and none carries a tangent."""
    for name, tensor in tensors.items():
        if tensor is not None and has_tangent([tensor]):
            raise GradientError(
                f"{name} carries a tangent of forward-mode AD and {reason}; "
                f"pass {name}.detach() to leave the tangent out"
            )
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise GradientError(
                f"{name} requires a gradient and {reason}; call under torch.no_grad(), or pass {name}.detach()"
            )

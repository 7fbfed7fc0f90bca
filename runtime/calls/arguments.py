"""From the arguments of a forward call to a `Call` that can be launched, or a typed error that says why not."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..codegen.model import Cast, DType, FusedAdd, FusedQuant, Mode, Norm, Rounding
from ..codegen.parameters import FORWARD
from ..dtypes import DTYPES, FLOATS, TORCH_DTYPES
from ..errors import (
    ConflictError,
    DeviceError,
    DTypeError,
    GradientError,
    IllegalCombinationError,
    LayoutError,
    ShapeError,
    TransformError,
)
from ..mode_words import word
from ..upstream.torch_internals import has_tangent, jit_tracing
from .overlap import REPLACEABLE, spoils

_NOT_DIFFERENTIABLE = (
    "the forward functions compute none; call normforge.layer_norm, rms_norm, add_layer_norm or add_rms_norm, which do"
)

# Kernels take numbers as fp32; anything larger would arrive there as infinity.
LARGEST_FP32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Call:
    """A checked call: its mode, its size, and every tensor and scalar a kernel may ask for by name."""

    mode: Mode
    m: int
    n: int
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    smooth_scale: torch.Tensor | None
    x_bias: torch.Tensor | None
    out: torch.Tensor | None
    residual_out: torch.Tensor | None
    eps: float
    weight_offset: float

    @property
    def wants(self) -> tuple[str, ...]:
        """The results that it returns."""
        return tuple(row.name for row in FORWARD.results if row.is_wanted(self.mode))


def prepare(
    norm: Norm,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
    fadd: str | int | FusedAdd = "none",
    smooth_scale: torch.Tensor | None = None,
    fquant: str | int | FusedQuant = "none",
    x_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float32,
    save_mv: bool = False,
    rounding: str | Rounding = "nearest",
    cast: str | Cast = "after_weight",
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    addressed: bool = True,
) -> Call:
    """Check everything a forward call was given; see `layernorm2d_fwd` for the arguments and errors.

    What a trace holds of a tensor has no address: addressed is False there, and outputs that overlap are not found.
    """
    add = word(FusedAdd, "fadd", fadd)
    quant = word(FusedQuant, "fquant", fquant)
    epsilon = check_number("eps", eps, least=0.0)
    offset = check_number("weight_offset", weight_offset, least=-math.inf)
    _check_presence(add, quant, residual, residual_out, smooth_scale, weight, offset)
    n = check_x(x)
    y_dtype = _output_dtype(x, quant, out_dtype, out)
    mode = _mode(
        norm=norm,
        dtype_in=DTYPES[x.dtype],
        dtype_out=y_dtype,
        fadd=add,
        fquant=quant,
        save_mv=_flag("save_mv", save_mv),
        x_bias=x_bias is not None,
        scale_dtype=_dtype("scale_dtype", scale_dtype),
        rounding=word(Rounding, "rounding", rounding),
        cast=word(Cast, "cast", cast).of(y_dtype, DTYPES[x.dtype]),
    )
    for name, vector in (("weight", weight), ("bias", bias), ("x_bias", x_bias), ("smooth_scale", smooth_scale)):
        if vector is not None:
            check_vector(name, vector, x)
    call = Call(
        mode=mode,
        m=x.numel() // n,
        n=n,
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
        smooth_scale=smooth_scale,
        x_bias=x_bias,
        out=out,
        residual_out=residual_out,
        eps=epsilon,
        weight_offset=offset,
    )
    row_stride("x", x)
    if residual is not None:
        check_rows("residual", residual, x, FLOATS)
    _check_outputs(call, addressed)
    return call


def _mode(**axes: Any) -> Mode:
    try:
        return Mode(**axes)
    except IllegalCombinationError as error:
        # The manifest's name for the axis is not the argument's.
        raise IllegalCombinationError(str(error).replace("dtype_out", "out_dtype")) from None


def row_stride(name: str, tensor: torch.Tensor) -> int:
    """The one stride, in elements, that steps from row to row of a (..., N) tensor.

    Raises:
        LayoutError: the last dimension is not contiguous, or the leading ones need more than one stride.
    """
    n = tensor.shape[-1]
    if n > 1 and tensor.stride(-1) != 1:
        raise LayoutError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension and kernels need 1; pass {name}.contiguous()"
        )
    # First, because in a trace a number of rows that depends on data can be compared with nothing.
    if tensor.is_contiguous():
        return n
    leading = [
        (size, stride) for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size != 1
    ]
    if not leading or tensor.numel() == 0:
        return n
    for (_, outer), (size, inner) in itertools.pairwise(leading):
        if outer != size * inner:
            raise LayoutError(
                f"the leading dimensions of {name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) do not "
                f"collapse to one row stride; pass {name}.contiguous()"
            )
    return leading[-1][1]


def _check_presence(
    fadd: FusedAdd,
    fquant: FusedQuant,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    smooth_scale: torch.Tensor | None,
    weight: torch.Tensor | None,
    weight_offset: float,
) -> None:
    if residual is None and fadd.adds:
        raise ConflictError(f"fadd {fadd.value!r} adds a residual and none was passed; pass residual, or fadd='none'")
    if residual is not None and not fadd.adds:
        raise ConflictError(
            "residual was passed and fadd 'none' would ignore it; pass fadd='pre_add_store' or 'pre_add'"
        )
    if residual_out is not None and not fadd.stores:
        raise ConflictError(
            f"residual_out was passed and fadd {fadd.value!r} does not store the sum; pass fadd='pre_add_store'"
        )
    if smooth_scale is None and fquant.smooths:
        raise ConflictError(
            "fquant 'smooth_dynamic' multiplies by a smooth_scale and none was passed; pass it, or fquant='dynamic'"
        )
    if smooth_scale is not None and not fquant.smooths:
        raise ConflictError(
            f"smooth_scale was passed and fquant {fquant.value!r} would ignore it; pass fquant='smooth_dynamic'"
        )
    check_offset(weight, weight_offset)


def check_offset(weight: torch.Tensor | None, weight_offset: float) -> None:
    """Check that there is a weight to add weight_offset to."""
    if weight is None and weight_offset:
        raise ConflictError(f"weight_offset={weight_offset} is added to weight and none was passed; pass weight")


def check_x(x: torch.Tensor) -> int:
    """Check what is normalised, and return N."""
    check_tensor("x", x)
    if jit_tracing():
        raise TransformError(
            "torch.jit.trace records no kernel; record with torch.export or torch.compile, which do, "
            "or call normforge.layer_norm or rms_norm, which run torch's own operator there"
        )
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(f"x has shape {tuple(x.shape)}; it takes (..., N) with N >= 1")
    check_dtype("x", x, FLOATS)
    if x.is_meta:
        raise DeviceError("x is on meta, where tensors hold no data; it takes a tensor on a GPU")
    return x.shape[-1]


def check_vector(name: str, vector: torch.Tensor, x: torch.Tensor) -> None:
    """Check an (N,) operand of x."""
    check_tensor(name, vector)
    n = x.shape[-1]
    if tuple(vector.shape) != (n,):
        raise ShapeError(f"{name} has shape {tuple(vector.shape)}; it takes ({n},), the last dimension of x")
    check_dtype(name, vector, FLOATS)
    check_device(name, vector, x)
    if n > 1 and vector.stride(0) != 1:
        raise LayoutError(f"{name} has stride {vector.stride(0)} and kernels need 1; pass {name}.contiguous()")


def check_rows(name: str, tensor: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> int:
    """Check an operand or output of x's shape, and return its row stride."""
    check_tensor(name, tensor)
    if tensor.shape != x.shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it takes x's, {tuple(x.shape)}")
    check_dtype(name, tensor, dtypes)
    check_device(name, tensor, x)
    return row_stride(name, tensor)


def refuse_gradient(call: Call) -> None:
    """Refuse a forward call whose outputs ought to have a gradient, and will not.

    Raises:
        GradientError: a tensor requires a gradient, and gradients are enabled.
    """
    check_no_gradient(
        "a quantised output has none" if call.mode.fquant.quantises else _NOT_DIFFERENTIABLE,
        x=call.x,
        weight=call.weight,
        bias=call.bias,
        residual=call.residual,
        x_bias=call.x_bias,
        smooth_scale=call.smooth_scale,
    )


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


def _check_outputs(call: Call, addressed: bool) -> None:
    inputs = {
        "x": call.x,
        "residual": call.residual,
        "weight": call.weight,
        "bias": call.bias,
        "x_bias": call.x_bias,
        "smooth_scale": call.smooth_scale,
    }
    others = {name: tensor for name, tensor in inputs.items() if tensor is not None} if addressed else {}
    if call.out is not None:
        _check_output("out", call.out, call.x, TORCH_DTYPES[call.mode.dtype_out], others, addressed)
        if addressed:
            others["out"] = call.out
    if call.residual_out is not None and call.residual is not None:
        _check_output("residual_out", call.residual_out, call.x, call.residual.dtype, others, addressed)


def _check_output(
    name: str,
    output: torch.Tensor,
    x: torch.Tensor,
    dtype: torch.dtype,
    others: dict[str, torch.Tensor],
    addressed: bool,
) -> None:
    stride = check_rows(name, output, x, (dtype,))
    check_no_gradient("what is written to it has none", **{name: output})
    if addressed and output.is_neg():
        raise LayoutError(f"{name} is a view that negates its memory (torch.Tensor.is_neg); pass memory of its own")
    # Of what a trace holds torch asks this itself.
    if addressed and output.is_inference() and not torch.is_inference_mode_enabled():
        raise GradientError(
            f"{name} is an inference tensor, which is written to under torch.inference_mode() alone; "
            f"call under that, or pass {name}.clone()"
        )
    if stride < x.shape[-1] and output.numel() > x.shape[-1]:
        raise LayoutError(f"the rows of {name} overlap (row stride {stride}, N {x.shape[-1]}); pass rows of their own")
    for other_name, other in others.items():
        may_replace = other_name in REPLACEABLE
        if spoils(output, other, may_replace):
            exact = " (the very same view would do)" if may_replace and output.dtype == other.dtype else ""
            raise LayoutError(f"{name} overlaps {other_name} in memory{exact}; pass memory of its own")


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Check that an argument is a tensor, and return it."""
    if not isinstance(value, torch.Tensor):
        raise DTypeError(f"{name} is a {type(value).__name__}; it takes a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"in layout {value.layout}"
        raise LayoutError(f"{name} is {kind}; it takes a dense tensor (torch.strided)")
    return value


def check_dtype(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that a tensor is of one of some types."""
    if tensor.dtype not in dtypes:
        raise DTypeError(f"{name} has dtype {tensor.dtype}; it takes {' or '.join(map(str, dtypes))}")


def check_device(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """Check that an operand is on x's device."""
    if tensor.device != x.device:
        raise DeviceError(f"{name} is on {tensor.device} and x on {x.device}; move one to the other's device")


def _dtype(name: str, dtype: object) -> DType:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise DTypeError(f"{name} is {dtype!r}; it takes one of {', '.join(map(str, DTYPES))}")
    return DTYPES[dtype]


def _output_dtype(
    x: torch.Tensor, fquant: FusedQuant, out_dtype: torch.dtype | None, out: torch.Tensor | None
) -> DType:
    if out_dtype is not None:
        return _dtype("out_dtype", out_dtype)
    if out is not None:
        check_dtype("out", check_tensor("out", out), tuple(DTYPES))
        return DTYPES[out.dtype]
    return DType.INT8 if fquant.quantises else DTYPES[x.dtype]


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise ConflictError(f"{name}={value!r} is no flag; it takes True or False")
    return bool(value)


def check_number(name: str, value: object, *, least: float) -> float:
    """Check that an argument is a number of at least `least` that fp32 can hold, and return it."""
    smallest = max(least, -LARGEST_FP32)
    # The comparison also fails for NaN.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not smallest <= value <= LARGEST_FP32:
        at_least = f" of at least {least:g}" if math.isfinite(least) else ""
        raise ConflictError(f"{name}={value!r} will not do; it takes a number{at_least} that is finite in fp32")
    return float(value)

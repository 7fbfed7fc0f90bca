"""Check the arguments of a call, by name, and return a `Call` that can be launched, or raise a typed error.

The rows of `codegen.parameters` say what there is to check, in loops, which run for the first call of a kind alone. The
first functions check one argument: that it is a tensor of a type, shape, device and layout that kernels take, or a
number. Each names the argument, what was passed and what it takes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, SupportsFloat, TypeGuard

import torch

from ..codegen.families import Kind
from ..codegen.model import Mode
from ..codegen.values import DY_GROUPS, Direction, DType, DyFormat
from ..dtypes import DTYPES, FLOATS, FP8_INPUTS, STORED_DTYPES, word
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
from ..kernels.strides import RowWalk, strides_of
from ..upstream.torch_internals import (
    constant_in_traces,
    has_tangent,
    is_sharded,
    is_transformed,
    jit_tracing,
    transforming,
)
from .functions import FUNCTIONS, Function, completed, function_named
from .row_layout import REPLACEABLE, row_stride, rows_overlap, spoils

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
_IN_FP32 = (Kind.SCALE, Kind.SCALES, Kind.VALUE, Kind.PER_ROW)
# The further types of some, by name: a mode without them refuses them.
_ALSO = {"dy": FP8_INPUTS, "dy_scale": (torch.float8_e8m0fnu,)}

# How an error about a shape ends, to be formatted with the shapes that `_shapes` returns.
_TAKES: Mapping[Kind, str] = {
    Kind.ROWS: "; it takes x's, {0}",
    Kind.VECTOR: "; it takes {0}, the last dimension of x",
    Kind.PER_ROW: "; it takes one value a row, {0}",
    Kind.SCALE: "; it takes one value a row, {0} or {1}, or one for all, (1,)",
    Kind.SCALES: "; it takes one value a row, {0} or {1}, one a group of 32 or 128, {2} or {3}, or one for all, (1,)",
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
    own = (torch.float32,) if kind in _IN_FP32 else FLOATS
    check_dtype(name, tensor, dtypes or (*own, *_ALSO.get(name, ())))
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
    if fits or (kind in (Kind.SCALE, Kind.SCALES, Kind.VALUE) and tensor.numel() == 1):
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
    if kind in (Kind.SCALE, Kind.SCALES):
        sizes = DY_GROUPS if kind is Kind.SCALES else ()
        return [leading, (*leading, 1), *[(*leading, -(-x.shape[-1] // size)) for size in sizes]]
    return [vector] if kind is Kind.VECTOR else []


def check_random(name: str, state: Any, x: torch.Tensor) -> None:
    """Check a seed and an offset, which are not read.

    Raises:
        ArgumentError: one of its kinds.
    """
    if not isinstance(state, torch.Tensor):
        raise DTypeError(f"{name} is a {type(state).__name__}; it takes an int64 tensor of seed and offset")
    refuse_sharded(x, state)
    # Not by `check_operand`, to which a shape follows from x's.
    check_dtype(name, state, (torch.int64,))
    if tuple(state.shape) != (2,):
        raise ShapeError(f"{name} has shape {tuple(state.shape)}; it takes (2,), seed and offset")
    check_device(name, state, x)
    check_contiguous(name, state)


def refuse_sharded(*tensors: object) -> None:
    """Refuse a dropout of rows that are dealt out over ranks.

    Raises:
        DeviceError: a tensor is a DTensor.
    """
    if is_sharded(*tensors):
        raise DeviceError(
            "dropout_p was passed with a DTensor, of whose rows no rank knows the numbers that the mask follows from; "
            "pass the to_local() of each tensor, with a dropout_rng that differs from rank to rank, or call "
            "torch.nn.functional.dropout before the norm"
        )


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


def check_no_gradient(reason: str, recorded: Container[str] = (), /, **tensors: torch.Tensor | None) -> None:
    """Check that no tensor requires a gradient while gradients are enabled, and none carries a tangent.

    Autograd records the tensors that `recorded` names, which may require a gradient.
    """
    for name, tensor in tensors.items():
        if tensor is not None and has_tangent([tensor]):
            raise GradientError(
                f"{name} carries a tangent of forward-mode AD and {reason}; "
                f"pass {name}.detach() to leave the tangent out"
            )
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and name not in recorded:
            raise GradientError(
                f"{name} requires a gradient and {reason}; call under torch.no_grad(), or pass {name}.detach()"
            )


_NOT_DIFFERENTIABLE = (
    "the forward functions compute none; call normforge.layer_norm, rms_norm, add_layer_norm or add_rms_norm, which do"
)

FP8_HAS_NO_GRADIENT = (
    "no kernel computes one of a norm of fp8; call normforge.layer_norm or rms_norm of the dequantised x, "
    "(x.float() * x_scale).bfloat16()"
)

# The functional API, which has no x_scale, adds this about an fp8 x.
TAKEN_WITH_ITS_SCALE = "and is taken with its scale by normforge.{}(x, x_scale=x_scale, ...), which has no gradient"

# Torch's operators also normalise float64, and the kernels do not.
_DOUBLE = (*FLOATS, torch.float64)


@dataclass(frozen=True)
class Call:
    """A checked call. Each argument is an attribute, by the names of its family's rows.

    Attributes:
        function: what is called.
        mode: which kernels serve it.
        m: rows.
        n: their length.
        wants: the results that it returns, by name.
        args: its arguments by name: of words the members of enums; None, or 0.0 for a number, where there is none.
    """

    function: Function = field(repr=False)
    mode: Mode
    m: int
    n: int
    wants: tuple[str, ...]
    args: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        # Asked for what is no field alone. Of an object that is being copied, `args` is none yet.
        args = self.__dict__.get("args", {})
        if name not in args:
            raise AttributeError(f"a call has no {name!r}")
        return args[name]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that plans depend on: "n", or "channels", "groups" and "positions" of GroupNorm."""
        sizes: Mapping[str, int] = self.args.get("sizes", {"n": self.n})
        return sizes

    def tensors_read(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the call reads, by the names that callers use."""
        takes = self.function
        there = [(name, self.args[name]) for name, _, _ in takes.tensors if self.args[name] is not None]
        return {takes.arguments.get(name, name): tensor for name, tensor in there}

    def with_args(self, **changed: Any) -> Call:
        """Return the call with other arguments in place of some."""
        return replace(self, args={**self.args, **changed})

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype of a result; None if the call does not return the result."""
        for result in self.function.results:
            if result.name == name and name in self.wants:
                if result.axis:
                    return STORED_DTYPES[getattr(self.mode, result.axis)]
                dtype: torch.dtype | None = self.args[result.set_by] if result.set_by else None
                like = [self.args[operand].dtype for operand in result.like if self.args[operand] is not None]
                return dtype or (like[0] if like else torch.float32)
        return None


def check(function: str, arguments: Mapping[str, Any], *, addressed: bool = True, packed: bool = False) -> Call:
    """Check everything that a call was given; see `layernorm2d_fwd` for the errors.

    Args:
        function: the name of what is called.
        arguments: its arguments, by name. What is missing is the default.
        addressed: whether tensors have addresses. What a trace holds has none, and outputs that overlap are not found.
        packed: whether rstd holds the means too, as `outputs` has them, and is not checked: no caller makes it.
    """
    takes = FUNCTIONS[function]
    args = {**dict(takes.defaults), **arguments}
    if addressed:
        refuse_transformed(**args)
    axes: dict[str, Any] = {"norm": takes.norm, "direction": takes.direction, **takes.family.axes}
    for name, words, axis in takes.words:
        args[name] = word(words, name, args[name])
        if axis:
            axes[axis] = args[name]
    for name, least, most in takes.numbers:
        args[name] = check_number(name, args[name], least=least, most=most)
    for name, axis in takes.flags:
        args[name] = axes[axis] = check_flag(name, args[name])
    for name, axis, optional in takes.dtypes:
        if args[name] is None and optional:
            continue
        check_result_dtype(name, args[name], is_gradient=not axis)
        if axis:
            axes[axis] = DTYPES[args[name]]
    x = args["x"]
    n = check_x(x, scaled=takes.direction is Direction.FORWARD and not takes.family_name)
    for name, kind, optional in takes.tensors:
        if name == "x":
            row_stride(name, x)
        elif (optional and args[name] is None) or (packed and kind is Kind.PER_ROW):
            continue
        elif kind is Kind.RANDOM:
            check_random(name, args[name], x)
        else:
            check_operand(kind, takes.arguments.get(name, name), args[name], x)
    for name, axis in takes.by_dtype:
        axes[axis] = DTYPES[args[name].dtype]
    for name, axis, without, there in takes.by_presence:
        # A word that says how a tensor is used says nothing about an absent one.
        absent = args[name] is None and axes.get(axis, there) is there
        axes[axis] = without if absent else axes.get(axis, there)
    for name, axis in takes.by_groups:
        axes[axis] = axes.get(axis, False) or (args[name] is not None and args[name].dim() > 1)
    dy, scales = args.get("dy"), getattr(args.get("dy_scale"), "shape", ())
    axes["dy_format"] = DyFormat.of(DTYPES[getattr(dy, "dtype", torch.float32)], scales, x.shape)
    if "dtype_out" not in axes:
        axes["dtype_out"] = _output_dtype(args, axes)
    if "scale_layout" in axes:
        axes["scale_layout"] = axes["scale_layout"].of_kernels
    # Without 16 bits to round to, y's or dy's, rows are rounded once.
    if "cast" in axes:
        axes["cast"] = axes["cast"].of(axes["dtype_out"] if dy is None else DTYPES[dy.dtype], axes["dtype_in"])
    try:
        mode = Mode(**axes)
    except IllegalCombinationError as error:
        # The manifest's name for the axis is not the argument's.
        raise IllegalCombinationError(str(error).replace("dtype_out", "out_dtype")) from None
    if n % mode.dtype_out.packs:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}, and two neighbours of {mode.dtype_out.value} share a byte; "
            "it takes an even N"
        )
    if mode.fadd.renorms and takes.family_name not in ("renormed", "quantised"):
        raise ConflictError(
            f"{function} takes no fadd {mode.fadd.value!r}; call normforge.renormed_{function}, or pass 'post_add'"
        )
    if mode.serves and not takes.family_name.startswith("quantised"):
        raise ConflictError(
            f"{function} takes no fquant {mode.fquant.value!r}; call normforge.quantised_layer_norm or "
            "quantised_rms_norm, which do, or pass 'dynamic' or 'smooth_dynamic'"
        )
    _check_presence(takes, mode, args)
    call = Call(takes, mode, x.numel() // n, n, _wants(takes, mode, args), args)
    _check_places(call, addressed)
    return call


def refuse_gradient(call: Call) -> None:
    """Refuse a call whose results ought to have a gradient, and will not.

    Raises:
        GradientError: a tensor requires a gradient, and gradients are enabled.
    """
    reason, recorded = _NOT_DIFFERENTIABLE, dict(call.function.gradients) if call.mode.save_unquant else {}
    if call.function.direction is Direction.BACKWARD:
        reason = "no kernel computes a gradient's gradient"
    elif call.mode.fquant.quantises:
        reason = "a quantised output has none"
        if call.function.family_name == "quantised":
            reason += "; save_unquant=True returns y unquantised too, with gradients in every operand of the norm"
    elif call.function.family_name:
        reason = f"the 2d functions compute none; call normforge.{call.function.family.functions[call.mode.norm]}"
    elif call.mode.dtype_in.is_fp8:
        reason = FP8_HAS_NO_GRADIENT
    check_no_gradient(reason, recorded, **call.tensors_read())


def _output_dtype(args: Mapping[str, Any], axes: Mapping[str, Any]) -> DType:
    """Return the dtype of y where none was passed."""
    out = args.get("out")
    if out is not None:
        check_dtype("out", check_tensor("out", out), tuple(DTYPES))
        return DTYPES[out.dtype]
    x, residual = args["x"], args.get("residual")
    quantises = "fquant" in axes and axes["fquant"].quantises
    if "fadd" in axes and axes["fadd"].is_after and residual is not None and not quantises:
        return DTYPES[residual.dtype]
    if x.dtype in FP8_INPUTS and not quantises:
        raise ConflictError(
            f"x has dtype {x.dtype}, which y cannot have without a scale, and no out_dtype was passed; pass "
            "out_dtype=torch.bfloat16, say, or fquant='dynamic'"
        )
    return DType.INT8 if quantises else DTYPES[x.dtype]


def _check_presence(takes: Function, mode: Mode, args: Mapping[str, Any]) -> None:
    """Check that what the mode reads was passed, and nothing that it does not."""
    for name, wanted, absent, unused in takes.conditions:
        error = absent if _asks(mode, wanted) else unused
        if error and (args[name] is None) is (error is absent):
            raise ConflictError(
                error.format(**{axis: args[argument].value for argument, _, axis in takes.words if axis})
            )
    _check_needs(takes, args)


def _check_needs(takes: Function, args: Mapping[str, Any]) -> None:
    """Check that there is what a number is added to."""
    for name, needed, error in takes.needs:
        if args[name] and args[needed] is None:
            raise ConflictError(error.format(**{name: args[name]}))


def _asks(mode: Mode, wanted: str) -> bool:
    """Return the value of an attribute of a mode, "fadd.adds" say; True for none."""
    value: Any = mode
    for name in wanted.split(".") if wanted else ():
        value = getattr(value, name)
    return not wanted or bool(value)


def _wants(takes: Function, mode: Mode, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the results that a call returns: those that the call names, if any, and else those of its mode."""
    if "wants" not in args:
        return tuple([result.name for result in takes.results if _asks(mode, result.wanted)])
    known = [result.name for result in takes.results]
    names = tuple(dict.fromkeys([*[result.name for result in takes.results if result.is_sure], *args["wants"]]))
    for name in names:
        if name not in known:
            raise ConflictError(f"wants has {name!r}; it takes some of {', '.join(known)}")
    for result in takes.results:
        if result.name not in names:
            continue
        name, without = result.name, result.like and all(args[like] is None for like in result.like)
        missing = result.like[0] if without else ""
        if not _asks(mode, result.wanted):
            missing = missing or "dropout_p"
        if missing:
            raise ConflictError(f"wants has {name!r} and no {missing} was passed; pass it, or leave {name!r} out")
    return names


def _check_places(call: Call, addressed: bool) -> None:
    """Check what is written to, against all that is read and what is written to besides."""
    others = call.tensors_read() if addressed else {}
    for name, result in call.function.outs:
        output, dtype = call.args[name], call.dtype_of(result)
        if output is not None and dtype is not None:
            check_output(name, output, call.x, dtype, others, addressed)
            if addressed:
                others[name] = output


def check_normalised(
    function: str, arguments: Mapping[str, Any], normalized_shape: Sequence[int] | None, *, kernel: bool
) -> tuple[int, ...]:
    """Check what a call of the functional API was given, and return normalized_shape as a tuple.

    Args:
        function: the name of the forward function of the same norm.
        arguments: those of its arguments that are taken here too, by name; vectors are of normalized_shape.
        normalized_shape: x's last dimensions; None is refused.
        kernel: whether a kernel is to run, which takes no float64.

    Raises:
        ShapeError: normalized_shape is not what x's shape ends in, or another tensor's shape does not fit.
        DTypeError: a tensor is of a type that cannot be normalised, or an argument is no tensor.
        DeviceError: tensors are on several devices.
        LayoutError: a tensor is sparse or nested.
        ConflictError: eps is no number of at least 0, or weight_offset none that is added to a weight.
    """
    x, dtypes = arguments["x"], FLOATS if kernel else _DOUBLE
    check_tensor("x", x)
    takes = function_named(function)
    other = f"which has no {takes.family_name} norm"
    refuse_fp8(x, other if takes.family_name else TAKEN_WITH_ITS_SCALE.format(function))
    check_dtype("x", x, dtypes)
    shape = _dimensions(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(
            f"normalized_shape is {shape} and x has shape {tuple(x.shape)}; "
            "it takes the last dimensions of x, one or more"
        )
    for name, kind, _ in takes.tensors:
        # A constant in a trace has the words of kinds; TorchDynamo of torch 2.11 makes no member of a word.
        operand, said = arguments.get(name), kind if isinstance(kind, str) else kind.value
        if operand is not None:
            wanted, its = (shape, "normalized_shape") if said == Kind.VECTOR.value else (tuple(x.shape), "x's shape")
            check_tensor(name, operand)
            if said in (Kind.SAMPLES.value, Kind.GROUPS.value):
                check_shape(Kind.SAMPLES if said == Kind.SAMPLES.value else Kind.GROUPS, name, operand, x)
            elif tuple(operand.shape) != wanted:
                raise ShapeError(f"{name} has shape {tuple(operand.shape)}; it takes {wanted}, {its}")
            check_dtype(name, operand, dtypes)
            check_device(name, operand, x)
    args = completed(function, arguments)
    for name, words, _ in takes.words:
        if name in arguments:
            word(words, name, args[name])
    for name, least, most in takes.numbers:
        check_number(name, args[name], least=least, most=most)
    _check_needs(takes, args)
    return shape


def _dimensions(normalized_shape: Sequence[int] | None) -> tuple[int, ...]:
    try:
        if isinstance(normalized_shape, Sequence):
            # A size that is symbolic in a trace is to stay so.
            symbolic = (int, torch.SymInt)
            return tuple([size if isinstance(size, symbolic) else operator.index(size) for size in normalized_shape])
    except TypeError:
        pass
    raise DTypeError(f"normalized_shape is {normalized_shape!r}; it takes a tuple of integers, (64,) say")

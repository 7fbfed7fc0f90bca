"""From the arguments of a call, by name, to a `Call` that can be launched, or a typed error that says why not.

What there is to check is said by the rows of `codegen.parameters`, in loops: this runs but for the first call of a
kind. `argument_checks` says what is checked of one argument.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..codegen.families import Kind
from ..codegen.model import Mode
from ..codegen.values import Direction, DType
from ..dtypes import DTYPES, FLOATS, FP8_INPUTS, stored_dtype, word
from ..errors import ConflictError, DTypeError, IllegalCombinationError, ShapeError
from .argument_checks import (
    check_device,
    check_dtype,
    check_flag,
    check_no_gradient,
    check_number,
    check_operand,
    check_output,
    check_result_dtype,
    check_shape,
    check_tensor,
    check_x,
    refuse_fp8,
    refuse_transformed,
)
from .functions import FUNCTIONS, Function, completed, function_named
from .randomness import check_random
from .row_layout import row_stride

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
                    return stored_dtype(getattr(self.mode, result.axis))
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
        axes[axis] = without if args[name] is None else there
    for name, axis in takes.by_groups:
        axes[axis] = axes.get(axis, False) or (args[name] is not None and args[name].dim() > 1)
    if "dtype_out" not in axes:
        axes["dtype_out"] = _output_dtype(args, axes)
    if "scale_layout" in axes:
        axes["scale_layout"] = axes["scale_layout"].of_kernels
    # Without 16 bits to round to, y's or dy's, rows are rounded once.
    dy = args.get("dy")
    if "cast" in axes:
        axes["cast"] = axes["cast"].of(axes["dtype_out"] if dy is None else DTYPES[dy.dtype], axes["dtype_in"])
    mode = _mode(axes)
    if n % mode.dtype_out.packs:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}, and two neighbours of {mode.dtype_out.value} share a byte; "
            "it takes an even N"
        )
    if mode.fadd.renorms and takes.family_name != "renormed":
        raise ConflictError(
            f"{function} takes no fadd {mode.fadd.value!r}; call normforge.renormed_{function}, or pass 'post_add'"
        )
    if mode.serves and takes.family_name != "quantised":
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
    reason = _NOT_DIFFERENTIABLE
    if call.function.direction is Direction.BACKWARD:
        reason = "no kernel computes a gradient's gradient"
    elif call.mode.fquant.quantises:
        reason = "a quantised output has none"
    elif call.function.family_name:
        reason = f"the 2d functions compute none; call normforge.{call.function.family.functions[call.mode.norm]}"
    elif call.mode.dtype_in.is_fp8:
        reason = FP8_HAS_NO_GRADIENT
    check_no_gradient(reason, **call.tensors_read())


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


def _mode(axes: Mapping[str, Any]) -> Mode:
    try:
        return Mode(**axes)
    except IllegalCombinationError as error:
        # The manifest's name for the axis is not the argument's.
        raise IllegalCombinationError(str(error).replace("dtype_out", "out_dtype")) from None


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


def _asks(mode: Mode, wanted: tuple[str, ...]) -> bool:
    """Follow a path of attributes from a mode, such as "fadd" and "adds"; return True for an empty path."""
    value: Any = mode
    for name in wanted:
        value = getattr(value, name)
    return bool(value) if wanted else True


def _wants(takes: Function, mode: Mode, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the results that a call returns: those that the call names, if any, and else those of its mode."""
    if "wants" not in args:
        return tuple([result.name for result in takes.results if _asks(mode, result.wanted)])
    names, known = tuple(args["wants"]), [result.name for result in takes.results]
    for name in names:
        if name not in known:
            raise ConflictError(f"wants has {name!r}; it takes some of {', '.join(known)}")
    for result in takes.results:
        if result.name not in names:
            continue
        name, missing = result.name, result.like[0] if all(args[like] is None for like in result.like) else ""
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
            if said == Kind.SAMPLES.value:
                check_shape(Kind.SAMPLES, name, operand, x)
            elif said == Kind.GROUPS.value:
                check_shape(Kind.GROUPS, name, operand, x)
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

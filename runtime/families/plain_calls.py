"""Calls of the differentiable functions of norms alone, and of modules: known, handed on, or checked."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ..calls import native, road
from ..calls.backend import backend, is_served, left_to_torch
from ..calls.check import check_dtype, check_normalised, check_number, check_tensor
from ..calls.plan import PLAIN
from ..calls.randomness import settled
from ..calls.road import FamilyCalls
from ..calls.sharded import Frame
from ..calls.traced import becomes_operator, is_dynamo_compiling, result_dtype, unrecorded
from ..codegen.families import Kind, Parameter
from ..codegen.parameters import FORWARD
from ..codegen.values import Norm
from ..compiled.rules import is_left_to_inductor
from ..dtypes import FLOATS
from ..errors import ConflictError
from ..random_mask import dropout_mask
from ..upstream.torch_internals import is_sharded, left_in_traces
from . import eager
from . import plain as recorded
from .eager import Dropout
from .operands import DEFAULT_EPS, Operands, Options
from .plain import CALLS
from .replaced import Replacing


def add_normalise(
    operands: Operands, normalized_shape: Sequence[int] | None, options: Options, asked: tuple[Any, Any, bool]
) -> Any:
    """Add and normalise over all of normalized_shape; None is x's last dimension. See `dropped_add_normalise`."""
    dropout_p, dropout_rng, returns_mask = asked
    # False equals 0.0, and is refused.
    if dropout_p != 0.0 or dropout_p is False or dropout_rng is not None or returns_mask:
        return dropped_add_normalise(operands, normalized_shape, options, asked)
    both = None
    if not is_dynamo_compiling() and operands[3].__class__ in PLAIN:
        shapes = () if normalized_shape is None else (normalized_shape,)
        both = native.calls.recorded.normalise(operands, options, *shapes)
    return normalise_first(operands, normalized_shape, options, adds=True) if both is None else both


def dropped_add_normalise(
    operands: Operands, normalized_shape: Sequence[int] | None, options: Options, asked: tuple[Any, Any, bool]
) -> Any:
    """Run `add_normalise` with a dropout of x; `asked` is dropout_p, dropout_rng and return_mask."""
    if not (is_dynamo_compiling() or asked[2]):
        result = recorded.normalise_dropped(operands, normalized_shape, options, asked[:2])
        if result is not None:
            return result
    if is_handed_on(operands):
        return handle_torch_function(dropped_add_normalise, operands, operands, normalized_shape, options, asked)
    return normalise_first(operands, normalized_shape, options, adds=True, asked=asked)


def normalise_last(operands: Operands, options: Options) -> Any:
    """Run `normalise` over the last dimension of x."""
    x, *_ = operands
    with unrecorded():
        shape = x.shape[-1:] if isinstance(x, torch.Tensor) else ()
    return normalise(operands, shape, options)


def normalise(
    operands: Operands, normalized_shape: Sequence[int] | None, options: Options, module: Replacing | None = None
) -> Any:
    """Run any norm of the functional API: y, or y and residual_out if there is a residual.

    Args:
        operands: the tensors.
        normalized_shape: the dimensions of x that are normalised together; None is refused.
        options: the norm's word and the other arguments. out_dtype is y's; None is as `layer_norm` says.
        module: the module that is called; None for a function.
    """
    result = None if is_dynamo_compiling() else native.calls.recorded.normalise(operands, options, normalized_shape)
    return normalise_first(operands, normalized_shape, options, module) if result is None else result


def normalise_cast_before_weight(
    operands: Operands, normalized_shape: Sequence[int], options: Options, module: Replacing | None = None
) -> Any:
    """Run `normalise` with a cast before the weight, as Hugging Face's models do.

    y has out_dtype, and if that has 16 bits it is what rows are rounded to; else they are rounded to x's. None is what
    a product of x's dtype and weight's has.
    """
    x, weight, *_ = operands
    if x.__class__ not in PLAIN and is_handed_on(operands):
        if module is not None and not is_served(operands) and (before := module.forward_before(x)) is not None:
            return before(module, x)
        return handle_torch_function(normalise_cast_before_weight, operands, operands, normalized_shape, options)
    norm, eps, weight_offset, y_dtype, cast = options
    if y_dtype is None and weight is not None:
        y_dtype = x.dtype if x.dtype is weight.dtype else torch.promote_types(x.dtype, weight.dtype)
    return normalise(operands, normalized_shape, (norm, eps, weight_offset, y_dtype, cast), module)


def normalise_first(
    operands: Operands,
    normalized_shape: Any,
    options: Options,
    module: Replacing | None = None,
    *,
    adds: bool = False,
    asked: tuple[Any, Any, bool] | None = None,
) -> Any:
    """Run `normalise` for a call that `native.calls` does not know.

    Args:
        operands: see `normalise`.
        normalized_shape: see `normalise`.
        options: see `normalise`.
        module: see `normalise`.
        adds: whether there has to be a residual.
        asked: dropout_p, dropout_rng and return_mask; None without dropout.
    """
    if asked is None and is_dynamo_compiling() and is_plain(operands, normalized_shape, options):
        return _traced(operands, normalized_shape, options, module)
    x = operands[0]
    if module is not None and not is_served(operands, options[1]) and (before := module.forward_before(x)) is not None:
        return before(module, x)
    if is_handed_on(operands):
        return _handed_on(operands, normalized_shape, options)
    if adds:
        check_tensor("x", operands[0])
        check_tensor("residual", operands[3])
        if normalized_shape is None:
            with unrecorded():
                normalized_shape = operands[0].shape[-1:]
    norm, _, weight_offset, *_ = options
    if norm == "layer" and check_number("weight_offset", weight_offset, least=-math.inf) != 0.0:
        operands, options = with_offset(operands, options)
        if asked is None:
            return normalise(operands, normalized_shape, options)
    kernel = isinstance(x, torch.Tensor) and backend(x) == "kernel"
    left = left_to_torch(operands)
    shape = checked(operands, normalized_shape, options, kernel=kernel and not left)
    norm, eps, weight_offset, out_dtype, cast = options
    options = (norm, None if eps is None else float(eps), float(weight_offset or 0.0), out_dtype, cast)
    if asked is None and kernel and not left and is_sharded(*operands):
        call = partial(normalise, normalized_shape=shape, options=options)
        return by_parts(Norm(norm).row.function, CALLS.rows, operands, call, len(shape))
    drops = None
    if asked is not None:
        # Drawn once nothing else can be refused.
        dropout_p, rng = settled(*asked[:2], x)
        if rng is None:
            result = normalise(operands, normalized_shape, options)
            return (*result, torch.ones(x.shape, dtype=torch.bool, device=x.device)) if asked[2] else result
        drops = Dropout(dropout_p, rng)
    if not kernel:
        result = eager.plain(operands, shape, options, drops)
    elif left or becomes_operator(*operands):
        result = _seen(operands, shape, options, left, drops)
    else:
        resolved: Any = (norm, DEFAULT_EPS if eps is None else options[1], *options[2:])
        result = recorded.normalise(operands, shape, resolved, drops)
    if drops is None or asked is None or not asked[2]:
        return result
    rows = (*x.shape[: -len(shape)], math.prod(shape))
    return (*result, dropout_mask(rows, drops.p, drops.rng).view(x.shape))


def checked(operands: Operands, normalized_shape: Any, options: Options, *, kernel: bool) -> tuple[int, ...]:
    """Check a call, and return the dimensions that are normalised; see `check_normalised`."""
    norm, eps, *_ = options
    with unrecorded():
        # Not by `road.named`, so that compiled code guards nothing of `CALLS`.
        function, names = road.function_of("recorded", norm)
        args = dict(zip(names, (*operands, *options[1:]), strict=False))
        if eps is None and norm == "rms":
            del args["eps"]
        return check_normalised(function, args, normalized_shape, kernel=kernel)


def _traced(operands: Operands, normalized_shape: Any, options: Options, module: Replacing | None) -> Any:
    """Run `normalise_first` for a call that TorchDynamo traces and `is_plain` accepts."""
    shape = tuple(normalized_shape)
    kernel, left = backend(operands[0]) == "kernel", left_in_traces()
    # The condition of `is_served`, inlined because tracing the function costs a dozen guards.
    if (left or not kernel) and module is not None and (before := module.forward_before(operands[0])) is not None:
        return before(module, operands[0])
    if not kernel:
        return eager.plain(operands, shape, options)
    return _seen(operands, shape, options, left)


def _seen(
    operands: Operands, shape: tuple[int, ...], options: Options, left: bool, drops: Dropout | None = None
) -> Any:
    """Run a call as an operator: normforge's, or torch's where Inductor is to fuse the norm or `left` is set."""
    x, weight, *_ = operands
    norm, eps, weight_offset, out_dtype, cast = options
    eps = DEFAULT_EPS if eps is None else float(eps)
    if left or (drops is None and is_left_to_inductor(norm, x, shape, scaled=weight is not None)):
        resolved = (norm, eps, weight_offset, out_dtype or result_dtype(norm, x), cast)
        return eager.plain(operands, shape, resolved, drops)
    resolved = (norm, eps, weight_offset, out_dtype, cast)
    return recorded.normalise_traced(operands, len(shape), resolved, drops)


def by_parts(
    function: str, rows: Sequence[Parameter], operands: Any, run: Callable[[Any], Any], dimensions: int = 1
) -> Any:
    """Run a call of DTensors: each rank normalises its rows, in a call of plain tensors.

    Args:
        function: the function's name.
        rows: of the operands.
        operands: the tensors.
        run: makes the call of plain tensors.
        dimensions: how many are normalised together.
    """
    frame = Frame(function, {row.name: operand for row, operand in zip(rows, operands, strict=True)}, dimensions)
    result = run(tuple([frame.part(row.kind, operand) for row, operand in zip(rows, operands, strict=True)]))
    if isinstance(result, tuple):
        return tuple([frame.whole(Kind.ROWS, each) for each in result])
    return frame.whole(Kind.ROWS, result)


def normalise_family(calls: FamilyCalls, operands: Any, options: Any, shape: Sequence[int] | None = None) -> Any:
    """Check and run a call of one of the other families that no look-up knows, and return its outputs.

    Args:
        calls: the family's row.
        operands: the tensors.
        options: the norm's word and the other arguments, numbers as they were passed.
        shape: x's last dimensions, normalised together by calls that return y alone; None is the last one.
    """
    x = operands[0]
    check_tensor("x", x)
    kernel = backend(x) == "kernel"
    left = left_to_torch(operands)
    with unrecorded():
        args = road.named(calls, operands, options)
        shape = x.shape[-1:] if shape is None else shape
        shape = check_normalised(calls.functions[options[0]], args, shape, kernel=kernel and not left)
    if len(shape) > 1:
        rows = tuple([None if each is None else each.flatten(-len(shape)) for each in operands])
        return normalise_family(calls, rows, options).view(x.shape)
    numbers = ("eps", "weight_offset")
    pairs = zip(calls.options, options[1:], strict=True)
    floats = (options[0], *[float(value) if name in numbers else value for name, value in pairs])
    if not kernel or left:
        *others, out_dtype, saves = floats
        return calls.eager(operands, (*others, out_dtype or result_dtype(options[0], x), saves))
    if is_sharded(*operands):
        function = calls.functions[options[0]]
        return by_parts(function, calls.rows, operands, lambda parts: normalise_family(calls, parts, floats))
    traced = becomes_operator(*operands)
    # The key of a known call holds the arguments as passed, and the surrounding state.
    return (road.normalise_traced if traced else road.normalise)(calls, operands, floats)


def with_offset(operands: Any, options: Any) -> tuple[Any, Any]:
    """Add weight_offset to the weight of a LayerNorm, whose kernels add nothing to weights."""
    x, weight, *others = operands
    norm, eps, weight_offset, *rest = options
    weight_offset = check_number("weight_offset", weight_offset, least=-math.inf)
    if weight is None:
        raise ConflictError(FORWARD["weight_offset"].absent.format(weight_offset=weight_offset))
    check_dtype("weight", check_tensor("weight", weight), (*FLOATS, torch.float64))
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + weight_offset
    return (x, weight, *others), (norm, eps, 0.0, *rest)


def is_handed_on(operands: Sequence[torch.Tensor | None]) -> bool:
    """Return True if the class of an operand is to be asked for the result of a call, as torch.fx's proxies are."""
    strange = any(type(operand) not in PLAIN for operand in operands if operand is not None)
    return strange and has_torch_function(operands)


def handed_on(name: str, operands: tuple[Any, ...], args: dict[str, Any], positional: int) -> Any:
    """Return the result of an operand's `__torch_function__` for a call.

    Args:
        name: the name of the public function that was called.
        operands: its tensors.
        args: its arguments by name; those that it lacks have their defaults.
        positional: how many of them are handed on without.
    """
    # Public functions stand on this module, which cannot import them.
    function = getattr(sys.modules[__name__.rsplit(".", 2)[0]], name)
    names = [name for name in inspect.signature(function).parameters if name in args]
    first = [args[name] for name in names[:positional]]
    return handle_torch_function(function, operands, *first, **{name: args[name] for name in names[positional:]})


def _handed_on(operands: Operands, normalized_shape: Sequence[int] | None, options: Options) -> Any:
    """Call `handed_on` for the public function of a call, or for `normalise` if none takes all arguments."""
    args = {**road.named(CALLS, operands, options), "normalized_shape": normalized_shape}
    adds = args["residual"] is not None
    if normalized_shape is not None and (adds or args["out_dtype"] is not None):
        return handle_torch_function(normalise, operands, operands, normalized_shape, options)
    return handed_on(f"{'add_' if adds else ''}{Norm(options[0]).row.function}", operands, args, positional=2)


def is_plain(operands: Operands, normalized_shape: Any, options: Options) -> bool:
    """Return True if `check_normalised` would accept a call of one dimension of plain tensors without float64.

    False does not mean that the call is wrong. TorchDynamo of torch 2.11 knows the type of numbers, but no __class__.
    """
    x, weight, bias, residual, x_bias = operands
    norm, eps, weight_offset, _, cast = options
    if normalized_shape.__class__ not in (tuple, list, torch.Size) or len(normalized_shape) != 1:
        return False
    (n,) = normalized_shape
    if type(n) is not int:
        return False
    is_told = norm == "rms" if eps is None else type(eps) is float and 0.0 <= eps <= 1.0
    if type(weight_offset) is not float or cast not in ("after_weight", "before_weight") or not is_told:
        return False
    if weight_offset != 0.0 and (norm != "rms" or weight is None or not -1.0 <= weight_offset <= 1.0):
        return False
    if x.__class__ not in (torch.Tensor, torch.nn.Parameter):
        return False
    for tensor in operands:
        if tensor is not None and not (
            tensor.__class__ in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and tensor.device == x.device
        ):
            return False
    shape = x.shape
    if len(shape) == 0 or n <= 0 or shape[-1] != n or (residual is not None and residual.shape != shape):
        return False
    for vector in (weight, bias, x_bias):
        if vector is not None and (len(vector.shape) != 1 or vector.shape[0] != n):
            return False
    return True

"""Calls of the differentiable GroupNorm, and of norms over channels: known, handed on, checked, or of DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch.nn import functional

from ...calls import native
from ...calls.backend import backend, is_served, left_to_torch
from ...calls.check import check_device, check_dtype, check_number, check_tensor
from ...calls.native import is_last
from ...calls.traced import becomes_operator, is_dynamo_compiling, result_dtype, unrecorded
from ...codegen.groups import Activation, Span
from ...codegen.parameters import GROUP
from ...codegen.values import Cast
from ...dtypes import FLOATS
from ...errors import ConflictError, ShapeError
from ...upstream.torch_internals import is_sharded
from .. import eager
from ..operands import DEFAULT_EPS, GroupOperands, GroupOptions, Operands, Options
from ..plain_calls import by_parts, checked, handed_on, is_handed_on
from ..plain_calls import normalise as normalise_rows
from . import row

_DTYPES = (*FLOATS, torch.float64)
_NAMES = ("x", "weight", "bias", "num_groups", "eps", "activation")


def normalise_known(operands: GroupOperands, key_args: row.KeyArgs) -> torch.Tensor | None:
    """Return the result of a call like an earlier one; None of another call."""
    known: torch.Tensor | None = None if is_dynamo_compiling() else native.calls.group.normalise(operands, key_args)
    return known


def normalise(operands: GroupOperands, key_args: row.KeyArgs) -> torch.Tensor:
    """Run a call of the public function, whose options, from num_groups on, are as callers passed them."""
    known = normalise_known(operands, key_args)
    if known is not None:
        return known
    _, num_groups, eps, activation, _ = key_args
    if is_handed_on(operands):
        args = dict(zip(_NAMES, (*operands, *key_args[1:-1]), strict=True))
        y: torch.Tensor = handed_on(row.NAME, operands, args, positional=5)
        return y
    x, *vectors = operands
    check_tensor("x", x)
    silu = row.applied(activation)
    if not isinstance(num_groups, (int, torch.SymInt)):
        num_groups = _as_int(num_groups)
    with unrecorded():
        _check(x, num_groups, *vectors)
    options = GroupOptions(num_groups, check_number("eps", eps, least=0.0), silu, result_dtype("group", x))
    if is_sharded(*operands):
        # Each rank normalises its samples, in a call of plain tensors.
        own_args = ("layer", *options[:-1], None)
        whole: torch.Tensor = by_parts(
            row.NAME, GROUP.inputs, operands, lambda parts: normalise(parts, own_args).contiguous(), x.dim() - 1
        )
        return whole
    if backend(x) != "kernel" or left_to_torch(operands) or 0 in x.shape:
        return eager.group(operands, options)
    if becomes_operator(*operands):
        return row.normalise_traced(operands, options)
    # Numbers of other classes are known as what they are converted to.
    return row.normalise(operands, options, ("layer", num_groups, options.eps, activation, None))


# The num_groups of calls over channels, by the norm's word.
_SPANS = {span.norm.value: span.num_groups for span in Span if not span.is_group}


def normalise_channels(
    operands: Operands, options: Options, dim: int, activation: str | Activation | None, *shape: Any
) -> torch.Tensor:
    """Run a call over the channels of x, (B, C, ...); `shape` is the normalized_shape of norms that take one.

    Channels that are innermost are rows if no activation follows, and so is what kernels do not take. Other channels
    have kernels of their own.
    """
    x, weight, bias, _, x_bias = operands
    norm, eps, weight_offset, _, cast = options
    silu = row.applied(activation)
    if dim.__class__ is int and dim == -1:
        raise ConflictError(f"activation is {activation!r}, and dim -1; use dim=1, or leave activation out")
    if dim.__class__ is not int or dim != 1:
        raise ConflictError(f"dim is {dim!r}; it takes -1, the last dimensions of x, or 1, the channels of (B, C, ...)")
    if x_bias is not None or weight_offset != 0.0 or cast not in (Cast.AFTER_WEIGHT, Cast.AFTER_WEIGHT.value):
        raise ConflictError("x_bias, weight_offset and cast go with dim=-1; leave them out with dim=1")
    is_tensor = isinstance(x, torch.Tensor)
    if is_tensor and x.dim() < 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}; with dim=1 it takes (B, C, ...), at least 2 dimensions")
    (normalized_shape,) = shape or (x.shape[1:2] if is_tensor else (),)
    if isinstance(normalized_shape, Sequence) and len(normalized_shape) > 1:
        raise ShapeError(f"normalized_shape is {tuple(normalized_shape)}; with dim=1 it takes (C,), the channels alone")
    images = (x, weight, bias)
    key_args = ("layer", _SPANS[norm], DEFAULT_EPS if eps is None else eps, activation, None)
    if is_tensor and is_last(normalized_shape, x.shape[1:2]):
        known = normalise_known(images, key_args)
        if known is not None:
            return known
    rows = (x.movedim(1, -1), *operands[1:])
    is_dense = is_tensor and is_served(images, eps) and not is_sharded(*images) and 0 not in x.shape
    is_activated = silu != row.applied(None)
    if is_dense and x.dim() > 2 and (is_activated or x.stride(1) != 1):
        checked(rows, normalized_shape, options, kernel=True)
        group_options = GroupOptions(key_args[1], float(key_args[2]), silu, result_dtype(norm, x))
        if becomes_operator(*images):
            return row.normalise_traced(images, group_options)
        return row.normalise(images, group_options, (*key_args[:2], group_options.eps, *key_args[3:]))
    if is_activated and is_tensor and x.dtype.itemsize == 2:
        # The norm and the activation share one rounding.
        wide: torch.Tensor = normalise_rows(rows, normalized_shape, (norm, eps, weight_offset, torch.float32, cast))
        return functional.silu(wide).to(result_dtype(norm, x)).movedim(-1, 1)
    y: torch.Tensor = normalise_rows(rows, normalized_shape, options)
    return (functional.silu(y) if is_activated else y).movedim(-1, 1)


def _as_int(number: Any) -> Any:
    """Return the int that a whole number of another class is, NumPy's say, as torch takes it; else the argument."""
    try:
        return index(number)
    except TypeError:
        return number


def _check(x: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check_dtype("x", x, _DTYPES)
    if x.dim() < 2:
        raise ShapeError(f"x has shape {tuple(x.shape)}; it takes (B, C, ...), at least 2 dimensions")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ShapeError(f"num_groups is {num_groups!r}; it takes a whole number from 1 that divides the channels")
    channels = x.shape[1]
    if channels % num_groups:
        raise ShapeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}; pass a divisor of {channels}"
        )
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        check_tensor(name, vector)
        if tuple(vector.shape) != (channels,):
            raise ShapeError(f"{name} has shape {tuple(vector.shape)}; it takes ({channels},), the channels of x")
        check_dtype(name, vector, _DTYPES)
        check_device(name, vector, x)

"""Random illegal calls: a legal one with one thing wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .problems import Choose, MadeCall

Arguments = dict[str, Any]


def _wrong_tensors(tensor: torch.Tensor) -> tuple[Sequence[Any], ...]:
    """Return what is no tensor, and tensors of other dtypes, elsewhere or laid out otherwise, and of other shapes."""
    shape, n = tensor.shape, tensor.shape[-1]
    dtypes = (torch.float64, torch.int64, torch.complex64, torch.bool, torch.uint8)
    zeros = torch.zeros(shape, device=tensor.device)
    layouts = [zeros.to_sparse(), zeros.to("meta")]
    if tensor.is_cuda:
        layouts.append(tensor.cpu())
    if n > 1:
        layouts.append(tensor.new_zeros((*shape[:-1], 2 * n))[..., ::2])
    return (
        ("text", 3, [1.0], object(), np.ones(3, dtype=np.float32), torch.float32),
        [zeros.to(dtype) for dtype in dtypes],
        layouts,
        [tensor.new_zeros(other) for other in ((*shape[:-1], n + 1), (1, *shape), (7, *shape), ())],
    )


# What is wrong whatever the rest of the call is.
_WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "eps": (-1.0, -1e-30, math.nan, math.inf, 1e39, "1e-5", None, True, 1j, [1e-5]),
    "weight_offset": (math.nan, math.inf, -1e39, "1", None, False, [0.0]),
    "fadd": ("no such", "PRE_ADD", 4, -1, None, 1.5, object(), ["none"]),
    "fquant": ("no such", 3, -1, None, 0.5, torch.int8),
    "rounding": ("no such", 2, None, True),
    "cast": ("no such", "before", 1, None, True),
    "save_mv": ("yes", 2, None, 0.5, [True]),
    "out_dtype": (torch.float64, torch.int32, torch.bool, "float16", 16, float),
    "scale_dtype": (torch.float64, torch.int8, torch.float8_e5m2, None, "float32"),
}

_VECTORS = ("weight", "bias", "x_bias", "smooth_scale")
_TENSORS = ("x", "residual", *_VECTORS, "out", "residual_out")


def _wrong_value(choose: Choose, made: MadeCall, given: Arguments) -> Arguments | None:
    name = choose([name for name in _WRONG_VALUES if name != "weight_offset" or made.call.kind.norm == "rms"])
    return {name: choose(_WRONG_VALUES[name])}


def _wrong_tensor(choose: Choose, made: MadeCall, given: Arguments) -> Arguments | None:
    name = choose([name for name in _TENSORS if given.get(name) is not None])
    ways = _wrong_tensors(given[name])
    # x of another shape is another call.
    return {name: choose(choose(ways[:-1] if name == "x" else ways))}


# Bytes from one tensor to another that it overlaps: both are aligned, so that nothing else is wrong.
_APART = 16


def _overlap(choose: Choose, made: MadeCall, given: Arguments) -> Arguments | None:
    """An output in memory that an input, or the other output, has too, and not as the same elements."""
    kind, x = made.call.kind, given["x"]
    dtypes = {"out": kind.out_dtype}
    if kind.fadd == "pre_add_store" and kind.residual:
        dtypes["residual_out"] = kind.residual.dtype
    name = choose(list(dtypes))
    victim = choose([other for other in _TENSORS if other != name and given.get(other) is not None])
    if x.numel() * dtypes[name].itemsize <= _APART:
        return None
    memory = torch.zeros(8 * x.numel() + 2 * _APART, dtype=torch.uint8, device=x.device)
    output = memory[: x.numel() * dtypes[name].itemsize].view(dtypes[name]).view(x.shape)
    old = given[victim]
    reach = _APART + old.numel() * old.dtype.itemsize
    return {name: output, victim: memory[_APART:reach].view(old.dtype).view(old.shape)}


Mistake = Callable[[Choose, MadeCall, Arguments], "Arguments | None"]

# Operands that are missing or unused, axes that no kernel combines: tests/calls has a row for each.
MISTAKES: tuple[Mistake, ...] = (_wrong_value, _wrong_value, _wrong_tensor, _wrong_tensor, _overlap)


def spoilt(choose: Choose, made: MadeCall) -> Arguments | None:
    """A call's arguments with one thing wrong; None where what was chosen to be wrong does not apply."""
    wrong = choose(MISTAKES)(choose, made, made.arguments)
    return None if wrong is None else made.arguments | wrong

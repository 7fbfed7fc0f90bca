"""Results of GroupNorm's operators, in the order of rows: by kernels, as fake tensors, and by torch's operators.

The tensor in the place of rstd holds the means too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..codegen.groups import Span
from ..dtypes import FLOATS
from ..errors import DTypeError, LayoutError
from ..families import eager
from ..families.group import row as group
from ..families.operands import GroupArrived, GroupNormGradients, GroupOptions

Results = Sequence["torch.Tensor | None"]


def names_of(args: Mapping[str, Any]) -> list[str]:
    """Return the names of the results that an operator returns."""
    if "wants" not in args:
        return ["y", "rstd"] if args["save_mv"] else ["y"]
    return [name for name in GroupNormGradients._fields if name in args["wants"] and args[name[1:]] is not None]


def run(args: Mapping[str, Any], by_formula: bool = False) -> Results:
    """Launch the kernels of an operator, or compute gradients by torch's operators, differentiable."""
    options, operands = _checked(args), (args["x"], args["weight"], args["bias"])
    if "wants" not in args:
        y, statistics = group.launched(*operands, options, saves=args["save_mv"])
        return y, None, statistics
    arrived = GroupArrived(args["dy"], *operands, args["statistics"], options, args["wants"])
    return eager.group_gradients(arrived) if by_formula else group.launched_backward(arrived)


def fake(args: Mapping[str, Any]) -> Results:
    """Return the results of an operator without values."""
    options, x, names = _checked(args), args["x"], names_of(args)
    if "wants" in args:
        dx = x.new_empty_strided(x.shape, x.stride()) if "dx" in names else None
        vectors = [args[name] if f"d{name}" in names else None for name in ("weight", "bias")]
        return dx, *[None if vector is None else vector.new_empty(vector.shape) for vector in vectors]
    y = x.new_empty_strided(x.shape, x.stride(), dtype=options.out_dtype or x.dtype)
    shape = group.statistics_shape(x, options.num_groups)
    return y, None, x.new_empty(shape, dtype=torch.float32) if "rstd" in names else None


def _checked(args: Mapping[str, Any]) -> GroupOptions:
    """Return the options of a call that kernels can serve: y is not quantised, and x has no gaps."""
    x, options = args["x"], GroupOptions._make([args.get(name) for name in GroupOptions._fields])
    is_group, no_activation = Span.of(options.num_groups).is_group, options.activation == group.applied(None)
    if not is_group and no_activation and group.are_channels_last(x) is not False:
        raise LayoutError(
            f"x has strides {x.stride()}; with num_groups {options.num_groups} and no activation it takes a contiguous "
            "x"
        )
    if group.are_channels_last(x) is None:
        raise LayoutError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; this operator takes positions or channels "
            "innermost, without gaps: pass x.contiguous(), or call normforge.group_norm"
        )
    if options.out_dtype not in (None, *FLOATS):
        raise DTypeError(
            f"out_dtype is {options.out_dtype}; it takes None, torch.float16, torch.bfloat16 or torch.float32"
        )
    return options

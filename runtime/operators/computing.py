"""The computations of operators, from arguments by name to results in the order of the rows, None for absent ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..calls import road
from ..calls.check import check
from ..calls.first import launched, refuse_foreign
from ..calls.functions import OPERATORS
from ..calls.outputs import dtypes_of
from ..calls.record import BackwardPass
from ..calls.traced import intercepted, operator
from ..codegen.families import Kind
from ..codegen.groups import GROUP, Span
from ..codegen.values import Direction
from ..dtypes import FLOATS
from ..errors import DTypeError, LayoutError
from ..families import eager, public
from ..families import statistics as statistics
from ..families.group import row as group
from ..families.operands import GroupArrived, GroupNormGradients, GroupOptions
from ..kernels.gpu import require_device
from ..upstream.torch_internals import dispatch_modes

Results = Sequence["torch.Tensor | None"]

# The functions that take the arguments of their operators.
PUBLIC = {name: getattr(public, name) for name, takes in OPERATORS.items() if not takes.family_name}


def run(function: str, args: Mapping[str, Any]) -> Results:
    """Launch the kernels of an operator."""
    takes = OPERATORS[function]
    refuse_foreign(takes.family, args)
    if takes.family_name == GROUP:
        return _run_group(args)
    results: Results
    if not takes.family_name:
        # The modes that see operators have seen this operator already.
        seen = dispatch_modes()
        results = launched(takes.family, takes.norm.value, None, args) if seen else PUBLIC[function](**args)
        return results
    if takes.direction is Direction.BACKWARD:
        require_device(check(function, args).x)
        # An operator returns contiguous tensors that alias no argument.
        return [None if each is None else _apart(each, args.values()) for each in _gradients(function, args)]
    calls = road.ROWS[takes.family_name]
    options = road.options_of(calls, takes.norm.value, args)
    results = road.launched(calls, road.operands_of(calls, args), options)
    return results


def run_named(*, function: str, **args: Any) -> Results:
    """Launch kernels, or call the operator if a mode or a class of tensors sees operators; see `intercepted`."""
    takes = OPERATORS[function]
    if not intercepted(*[args[name] for name, _, _ in takes.tensors]):
        return run(function, args)
    is_group = takes.family_name == GROUP
    names = names_of_group(args) if is_group else check(function, args, addressed=False).wants
    outputs = iter(operator(function)(*[args[name] for name in takes.passed]))
    return [next(outputs) if row.name in names else None for row in takes.family.results]


def by_formula(function: str, args: Mapping[str, Any]) -> Results:
    """Compute the results of a backward operator by torch's operators, differentiable."""
    takes = OPERATORS[function]
    if takes.family_name == GROUP:
        return _run_group(args, by_formula=True)
    if takes.family_name:
        return _gradients(function, args, by_formula=True)
    args = {**dict(takes.defaults), **args}
    args["statistics"] = args["mean"], args["rstd"]
    operands: tuple[str, ...] = ("dy", "x", "weight", "statistics", "x_bias", "dresidual_out")
    options: tuple[str, ...] = ("weight_offset", "cast", "dx_dtype", "bias_dtype", "wants")
    if args["dropout_rng"] is not None:
        operands, options = (*operands, "dropout_rng"), (*options, "dropout_p", "dropped_dtype")
    norm = takes.norm.value
    return eager.plain_gradients([args[name] for name in operands], (norm, *[args[name] for name in options]))


def shares_no_row(function: str, args: Mapping[str, Any]) -> bool:
    """Return True if each row has a modulation of its own: kernels sum nothing, and torch's operators are fused."""
    rank = args["x"].dim()
    modulations = [args[name] for name, kind, _ in OPERATORS[function].tensors if kind is Kind.SAMPLES]
    return any(each is not None and each.dim() == rank > 1 for each in modulations)


def _gradients(function: str, args: Mapping[str, Any], by_formula: bool = False) -> Results:
    takes = OPERATORS[function]
    calls, norm = road.ROWS[takes.family_name], takes.norm.value
    assert calls.recording is not None
    gradients = dict(OPERATORS[calls.functions[norm]].gradients)
    total, gated, dy = args["x"], args.get("gated"), args["dy"]
    # The sum has the residual's dtype. Without a gate its gradient is that of x, too.
    own = {"x": total} if gated is None else {"x": gated, "residual": total}
    gradients |= {"x": "dx" if gated is None else "dgated"}
    operands = road.operands_of(calls, {**args, **own})
    dtypes = list(dtypes_of(operands))
    summed = calls.inputs.index("x" if gated is None else "residual")
    dtypes[summed] = args.get("dx_dtype") or dtypes[summed]
    named = [gradients.get(name, "") for name in calls.inputs]
    due = tuple([name in args["wants"] and operand is not None for name, operand in zip(named, operands, strict=True)])
    saved = (*calls.saved(operands, total), (args.get("mean"), args["rstd"]))
    kept_args = calls.args(road.options_of(calls, norm, args), tuple(dtypes))
    dy = torch.zeros_like(total) if dy is None else dy
    grads = calls.recording.gradients(BackwardPass(saved, kept_args, dy, args.get("dresidual_out"), due, by_formula))
    by_name = {name: each for name, each in zip(named, grads, strict=True) if each is not None}
    return [by_name.get(row.name) for row in takes.family.results]


def _apart(result: torch.Tensor, operands: Iterable[Any]) -> torch.Tensor:
    if result.is_contiguous() and not any(result is each for each in operands):
        return result
    return result.clone(memory_format=torch.contiguous_format)


# GroupNorm, where the tensor in the place of rstd holds the means too.


def names_of_group(args: Mapping[str, Any]) -> list[str]:
    """Return the names of the results that an operator returns."""
    if "wants" not in args:
        return ["y", "rstd"] if args["save_mv"] else ["y"]
    return [name for name in GroupNormGradients._fields if name in args["wants"] and args[name[1:]] is not None]


def _run_group(args: Mapping[str, Any], by_formula: bool = False) -> Results:
    """Launch the kernels of an operator, or compute gradients by torch's operators, differentiable."""
    options, operands = _group_options(args), (args["x"], args["weight"], args["bias"])
    if "wants" not in args:
        y, statistics = group.launched(*operands, options, saves=args["save_mv"])
        return y, None, statistics
    arrived = GroupArrived(args["dy"], *operands, args["statistics"], options, args["wants"])
    return eager.group_gradients(arrived) if by_formula else group.launched_backward(arrived)


def fake_group(args: Mapping[str, Any]) -> Results:
    """Return the results of an operator without values."""
    options, x, names = _group_options(args), args["x"], names_of_group(args)
    if "wants" in args:
        dx = x.new_empty_strided(x.shape, x.stride()) if "dx" in names else None
        vectors = [args[name] if f"d{name}" in names else None for name in ("weight", "bias")]
        return dx, *[None if vector is None else vector.new_empty(vector.shape) for vector in vectors]
    y = x.new_empty_strided(x.shape, x.stride(), dtype=options.out_dtype or x.dtype)
    shape = group.statistics_shape(x, options.num_groups)
    return y, None, x.new_empty(shape, dtype=torch.float32) if "rstd" in names else None


def _group_options(args: Mapping[str, Any]) -> GroupOptions:
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

"""The computations of operators, from arguments by name to results in the order of the rows, None for absent ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..calls import road
from ..calls.check import check, refuse_sharded
from ..calls.first import launched, refuse_foreign
from ..calls.functions import OPERATORS, Function
from ..calls.outputs import dtypes_of, group_scales
from ..calls.record import BackwardPass
from ..calls.row_layout import walkable
from ..calls.sharded import Frame
from ..calls.traced import intercepted, operator
from ..codegen.families import Kind, Result
from ..codegen.groups import GROUP, Span
from ..codegen.values import Direction, ScaleLayout
from ..dtypes import FLOATS, dequantised
from ..errors import DTypeError, LayoutError
from ..families import eager, public
from ..families import statistics as statistics
from ..families.group import row as group
from ..families.operands import GroupNormGradients, GroupOptions
from ..kernels.gpu import require_device
from ..upstream.torch_dtensor import assembled
from ..upstream.torch_internals import dispatch_modes
from .kernels import NAMESPACE, both

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
        results = launched(takes.family, takes.norm.value, None, args) if dispatch_modes() else PUBLIC[function](**args)
        return results
    calls = road.ROWS[takes.family_name]
    if takes.direction is Direction.BACKWARD and calls.recording is not None:
        require_device(check(function, args).x)
        # An operator returns contiguous tensors that alias no argument.
        return [None if each is None else _apart(each, args.values()) for each in _gradients(function, args)]
    results = road.launched(calls, road.operands_of(calls, args), road.options_of(calls, takes.norm.value, args))
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
    args["dy"] = dequantised(args["dy"], args["dy_scale"])
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
    due = tuple([name in args["wants"] for name in GroupNormGradients._fields])
    call = BackwardPass((*operands, args["statistics"]), (options,), args["dy"], None, due)
    return eager.group_gradients(call) if by_formula else group.launched_backward(call)


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


# DTensors: each rank computes its rows, and `calls.sharded` decides the placements.
#
# The rules are the dispatcher's (`torch.library.register_torch_dispatch`). `register_sharding` does not fit: it has one
# placement for all tensors of a list, which these operators return, and DTensor caches its answer for a call by tensors
# and integers, and ignores words and dtypes.


def rule_dtensors(library: torch.library.Library) -> None:
    """Give every operator of `OPERATORS`, which a library defines, its rule. This imports DTensor."""
    from torch.distributed.tensor import DTensor

    for name, takes in OPERATORS.items():
        function = PUBLIC.get(name, partial(run_named, function=name))
        for own, outs in {name: {}, f"{name}_into": dict(takes.outs)}.items():
            if outs or own == name:
                for defined, compute in both(own, function).items():
                    rule = torch.no_grad()(_sharded(takes, outs, compute))
                    torch.library.register_torch_dispatch(f"{NAMESPACE}::{defined}", DTensor, rule, lib=library)


def _sharded(takes: Function, outs: Mapping[str, str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes the results of an operator for DTensors, given all its arguments in order.

    An operator that writes to outs returns the other results, as tensors without elements if not asked for.
    """

    def run(cls: type, operator: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Sequence[torch.Tensor]:
        operands = {**dict(takes.defaults), **dict(zip((*takes.passed, *outs), args, strict=False))}
        frame = _frame(operator, operands, takes)
        written = {out: _written(frame, out, operands[out]) for out in outs if operands[out] is not None}
        results = function(**_parts(frame, takes, operands), **written)
        returned = []
        for row, part in zip(takes.family.results, results, strict=True):
            if row.name in outs.values() or (part is None and not outs):
                continue
            if part is None:
                x, part = frame.like, frame.like.to_local().new_empty(0)
                returned.append(assembled(part, x, part.shape, frame.of_vectors))
            else:
                returned.append(_whole(frame, takes, row, part, operands))
        return tuple(returned) if outs else returned

    return run


def _whole(frame: Frame, takes: Function, row: Result, part: torch.Tensor, operands: Mapping[str, Any]) -> torch.Tensor:
    """Return the whole of a rank's part of a result."""
    if row.name.endswith("_scale") and row.kind is Kind.PER_ROW and "scale_layout" in operands:
        return _scales(frame, part, operands)
    if row.kind in (Kind.COLUMNS, Kind.VALUE):
        return _of_all_rows(frame, row, part)
    if row.kind is Kind.PER_NORM:
        raise LayoutError(
            "save_mv was passed with rows that are sharded, and the statistics of both norms are one tensor; pass each "
            "rank's part, x.to_local(), or call normforge.layer_norm_add or rms_norm_add"
        )
    if row.kind is Kind.PER_ROW and takes.family_name == GROUP:
        shape = torch.Size((part.shape[0], frame.like.shape[0], part.shape[2]))
        return assembled(part, frame.like, shape, _of_statistics(frame))
    if row.kind is Kind.IMAGES:
        return frame.whole(Kind.ROWS, part.contiguous())
    # A gradient has the shape of its operand.
    is_gradient = takes.direction is Direction.BACKWARD and row.kind is not Kind.ROWS
    return frame.whole(row.kind, part, operands[row.like[0]] if is_gradient else None)


def _of_all_rows(frame: Frame, row: Result, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor of y along columns, or of an amax: replicated, as the rows are.

    Raises:
        LayoutError: rows are sharded, and no rank has the result.
    """
    if frame.deals:
        raise LayoutError(
            f"{row.name} was asked for with rows that are sharded, and is of the rows of all ranks; pass each rank's "
            "part, x.to_local()"
        )
    return assembled(part, frame.like, part.shape, frame.of_vectors, part.stride())


def _frame(operator: Any, operands: Mapping[str, Any], takes: Function) -> Frame:
    if operands.get("dropout_rng") is not None:
        refuse_sharded(operands["x"])
    tensors = {name: each for name, each in operands.items() if isinstance(each, torch.Tensor)}
    # All groups of a row are on one rank, and so are the weights of groups.
    grouped = any(name in tensors and tensors[name].dim() > 1 for name, _ in takes.by_groups)
    samples = takes.family_name == GROUP
    return Frame(str(operator), tensors, operands["x"].dim() - 1 if samples else 2 if grouped else 1)


def _parts(frame: Frame, takes: Function, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a rank's call, without outs."""
    parts = {name: operands[name] for name in takes.passed}
    for name, kind, _ in takes.tensors:
        if kind is Kind.PER_ROW and takes.family_name == GROUP:
            parts[name] = operands[name].redistribute(placements=_of_statistics(frame)).to_local()
            continue
        part = frame.part(kind, operands[name])
        # Kernels can walk the strides of the whole, but not always those of a part.
        if part is not None and kind.has_row_stride:
            part = walkable(part)
        elif kind is Kind.IMAGES and group.are_channels_last(part) is None:
            part = part.contiguous()
        parts[name] = part
    return parts


def _scales(frame: Frame, part: torch.Tensor, operands: Mapping[str, Any]) -> torch.Tensor:
    """Return a DTensor of a rank's scales, per row or per group: sharded as the rows are, in the layout of each part.

    Raises:
        LayoutError: scales are in tiles, and the rows of a tile are on several ranks.
    """
    x, layout = frame.like, ScaleLayout(operands["scale_layout"])
    columns = part.shape[x.dim() - 1 :]
    if layout.swizzles:
        if frame.deals:
            raise LayoutError(
                "scale_layout 'swizzled_128x4' was passed with rows that are sharded, and a tile has 128 rows of one "
                "rank; pass each rank's part, x.to_local(), or another scale_layout"
            )
        return assembled(part, x, part.shape, frame.of_vectors)
    if not columns:
        return frame.whole(Kind.PER_ROW, part)
    m, on_meta = x.numel() // x.shape[-1], partial(torch.empty, device="meta")
    whole = group_scales(on_meta, x.shape[:-1], m, columns[0], part.dtype, layout)
    return assembled(part, x, whole.shape, frame.of_rows, whole.stride())


def _written(frame: Frame, name: str, whole: Any) -> torch.Tensor:
    """Return a rank's part of an out; an out cannot be redistributed."""
    if whole.placements != frame.of_rows:
        raise LayoutError(
            f"{name} has placements {whole.placements} and what is written there {frame.of_rows}; give it those, or "
            "leave it out"
        )
    part: torch.Tensor = whole.to_local()
    return part


def _of_statistics(frame: Frame) -> tuple[Any, ...]:
    """Return the placements of GroupNorm's statistics, (2, B, groups), for sharded samples."""
    from torch.distributed.tensor import Shard

    return tuple(
        [Shard(1) if row != vector else vector for row, vector in zip(frame.of_rows, frame.of_vectors, strict=True)]
    )

"""Calls of gated norms: the row of the family; `calls/road.py` and `calls/row_gradients.py` have the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from ...calls import native, road
from ...calls.backend import backend
from ...calls.check import check_flag, check_normalised, check_tensor
from ...calls.outputs import LayerNormOutput
from ...calls.record import BackwardPass, Recording
from ...calls.road import Options, calls_of, launch_recorded
from ...calls.row_gradients import Backward, Problem, shared_sum, sum_dtype
from ...calls.row_layout import walkable
from ...calls.traced import is_dynamo_compiling, unrecorded
from ...codegen.model import Mode
from ...codegen.parameters import GATED, GATED_BWD
from ...codegen.values import Direction, GateActivation, Gating, Norm
from ...dtypes import DTYPES, word
from ...errors import ShapeError
from ...upstream.torch_internals import is_sharded
from .. import eager
from ..operands import GatedArgs, GatedOperands, GatedOptions, GatedSaved
from ..plain_calls import by_parts, handed_on, is_handed_on, normalise_family

# By norm_before_gate.
GATING = {True: Gating.AFTER_NORM.value, False: Gating.BEFORE_NORM.value}


def with_words(options: Options) -> Any:
    """Return options whose norm_before_gate, and the activation, which is checked later, are words of the rows."""
    # Written out: lists of the others take 0.8 us of each call.
    norm, norm_before_gate, activation, eps, weight_offset, fquant, out_dtype, saves = options
    if norm_before_gate.__class__ is not bool:
        norm_before_gate = check_flag("norm_before_gate", norm_before_gate)
    # An enum's member is no word of a schema.
    activation = activation.value if isinstance(activation, GateActivation) else activation
    return norm, GATING[norm_before_gate], activation, eps, weight_offset, fquant, out_dtype, saves


def divides(group_size: object, n: int) -> TypeGuard[int]:
    """Return True if group_size divides n."""
    return (
        isinstance(group_size, int) and not isinstance(group_size, bool) and 0 < group_size <= n and n % group_size == 0
    )


def in_groups(operands: GatedOperands, group_size: object) -> GatedOperands:
    """Return the tensors of a call as (..., G, group_size) and (G, group_size).

    Raises:
        ShapeError: group_size does not divide N, or a tensor's shape does not fit x's.
    """
    x, *others = operands
    check_tensor("x", x)
    with unrecorded():
        n = x.shape[-1] if x.dim() else 0
        if not divides(group_size, n):
            raise ShapeError(
                f"group_size={group_size!r} and x has shape {tuple(x.shape)}; it takes a divisor of N, {n}"
            )
        for name, tensor, shape in zip(CALLS.inputs[1:], others, (x.shape, x.shape[-1:], x.shape[-1:]), strict=True):
            has = tuple(check_tensor(name, tensor).shape) if tensor is not None or name == "gate" else tuple(shape)
            if has != tuple(shape):
                raise ShapeError(f"{name} has shape {has}; it takes {tuple(shape)}")
    result: Any = [
        None if each is None else each.view(*each.shape[:-1], n // group_size, group_size) for each in operands
    ]
    grouped: GatedOperands = tuple(result)
    return grouped


def forward(operands: GatedOperands, options: Options, group_size: int | None) -> LayerNormOutput:
    """Run a call of `gated_layernorm2d_fwd` or `gated_rmsnorm2d_fwd`, whose options begin with norm_before_gate."""
    options = road.options_2d(operands, with_words(options))
    if group_size is not None:
        operands = in_groups(operands, group_size)
    result: LayerNormOutput = road.launched_2d(CALLS, operands, options)
    return result if group_size is None else result._replace(y=result.y.flatten(-2))


# The second dimension of a grid takes 65535, and each group has a program or more.
_MOST_GROUPS = 2**15


def mode_of(args: GatedArgs, dtype: torch.dtype, grouped: bool) -> Mode:
    """Return the mode of the backward kernels for rows of a dtype; `grouped` gives each group of columns a weight."""
    own = DTYPES[dtype]
    return Mode(
        Norm(args.norm),
        own,
        own,
        direction=Direction.BACKWARD,
        gating=word(Gating, "gating", args.gating),
        gate_activation=word(GateActivation, "activation", args.activation),
        grouped=grouped,
    )


def _groups(kept: GatedSaved) -> int:
    """Return how many groups of columns have a weight or bias of their own; 0 if all groups share one."""
    return max(
        [0, *[vector.shape[0] for vector in (kept.weight, kept.bias) if vector is not None and vector.dim() > 1]]
    )


def _problem(call: BackwardPass) -> Problem:
    kept: GatedSaved
    kept, args, dy, _, due, *_ = call
    groups = _groups(kept)
    mode = mode_of(args, kept.x.dtype, groups > 0)
    rows: dict[str, Any] = {"dy": dy, "x": kept.x, "gate": kept.gate}
    inputs: dict[str, torch.Tensor | None] = {
        **{name: _in_one_row(tensor, groups) for name, tensor in rows.items()},
        "weight": _of_groups(kept.weight, groups),
        "bias": _of_groups(kept.bias, groups) if mode.gating.is_after else None,
        "mean": kept.mean,
        "rstd": kept.rstd,
    }
    parts = groups or 1
    # A vector for all of several groups is added up once more.
    dtypes = {
        row.name: sum_dtype(operand, parts) if row.is_sum else dtype
        for row, operand, dtype, needed in zip(GATED_BWD.results, kept[:-2], args.dtypes, due, strict=True)
        if needed and operand is not None and dtype is not None
    }
    return Problem(mode, parts, inputs, dtypes, {"dweight": kept.weight, "dbias": kept.bias})


def _of_results(call: BackwardPass, results: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
    kept: GatedSaved = call.saved
    vectors = (("dweight", kept.weight), ("dbias", kept.bias))
    return [
        results.get("dx"),
        results.get("dgate"),
        *[shared_sum(results[name], own) if name in results and own is not None else None for name, own in vectors],
    ]


def _in_one_row(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the rows of all groups of a token as one row: the rows of one group are that far apart."""
    return walkable(rows.flatten(-2) if groups else rows)


def _laid_out(kept: GatedSaved, rows: torch.Tensor) -> torch.Tensor:
    """Return rows that kernels can walk, in their own shape: the very tensor, or a copy."""
    laid_out = _in_one_row(rows, _groups(kept))
    return rows if laid_out.data_ptr() == rows.data_ptr() else laid_out.view(rows.shape)


def _of_groups(vector: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """Return a contiguous vector with a row per group, or the vector itself if there are no groups."""
    if vector is None or not groups:
        return vector
    return (vector if vector.dim() > 1 else vector.expand(groups, -1)).contiguous()


IN_PARTS = Backward.of(
    GATED_BWD,
    GatedSaved,
    serves=lambda kept: _groups(kept) <= _MOST_GROUPS,
    formula=eager.gated_gradients,
    laid_out=_laid_out,
    problem=_problem,
    of_results=_of_results,
)
CALLS = calls_of(
    GATED,
    eager=eager.gated,
    saved=lambda operands, total: operands,
    args=lambda options, dtypes, y_dtype=None: GatedArgs(options[0], options[1], options[2], options[4], dtypes),
    recording=Recording(launch_recorded, IN_PARTS.recorded, "gated_gradients"),
)


def normalise(operands: GatedOperands, options: Any, group_size: int | None) -> Any:
    """Run a call of a public function, whose options begin with norm_before_gate."""
    return _run(operands, with_words(options), group_size)


def _run(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> Any:
    result = None
    if group_size is None and not is_dynamo_compiling():
        result = native.calls.gated.normalise(operands, options)
    if result is not None:
        return result
    if is_handed_on(operands):
        args = road.named(CALLS, operands, options)
        args |= {"norm_before_gate": args["gating"] == GATING[True], "group_size": group_size}
        return handed_on(CALLS.functions[options[0]], operands, args, positional=2)
    if is_sharded(*operands):
        # Parts may fit on one rank and not on another: the first would wait for the second.
        name, args, x = CALLS.functions[options[0]], road.named(CALLS, operands, options), operands[0]
        check_normalised(name, args, x.shape[-1:], kernel=backend(x) == "kernel")
        # Each rank normalises its rows, in a call of plain tensors.
        return by_parts(name, CALLS.rows, operands, lambda parts: _run(parts, options, group_size))
    if group_size is None:
        return normalise_family(CALLS, operands, options)
    return _run(in_groups(operands, group_size), options, None).flatten(-2)

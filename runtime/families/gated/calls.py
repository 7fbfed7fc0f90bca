"""Calls of the differentiable functions of gated norms: known, handed on, in groups, or of DTensors."""

from __future__ import annotations

from typing import Any

from ...calls import native, road
from ...calls.backend import backend
from ...calls.check import check_normalised
from ...calls.traced import is_dynamo_compiling
from ...upstream.torch_internals import is_sharded
from ..operands import GatedOperands, GatedOptions
from ..plain_calls import by_parts, handed_on, is_handed_on, normalise_family
from . import row


def normalise(operands: GatedOperands, options: Any, group_size: int | None) -> Any:
    """Run a call of a public function, whose options begin with norm_before_gate."""
    return _run(operands, row.with_words(options), group_size)


def _run(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> Any:
    result = None
    if group_size is None and not is_dynamo_compiling():
        result = native.calls.gated.normalise(operands, options)
    if result is not None:
        return result
    if is_handed_on(operands):
        args = road.named(row.CALLS, operands, options)
        args |= {"norm_before_gate": args["gating"] == row.GATING[True], "group_size": group_size}
        return handed_on(row.CALLS.functions[options[0]], operands, args, positional=2)
    if is_sharded(*operands):
        return _by_parts(operands, options, group_size)
    if group_size is None:
        return normalise_family(row.CALLS, operands, options)
    return _run(row.in_groups(operands, group_size), options, None).flatten(-2)


def _by_parts(operands: GatedOperands, options: GatedOptions, group_size: int | None) -> Any:
    """Run a call of DTensors: each rank normalises its rows, in a call of plain tensors."""
    x, *_ = operands
    name, args = row.CALLS.functions[options[0]], road.named(row.CALLS, operands, options)
    # Parts may fit on one rank and not on another: the first would wait for the second.
    check_normalised(name, args, x.shape[-1:], kernel=backend(x) == "kernel")
    return by_parts(name, row.CALLS.rows, operands, lambda parts: _run(parts, options, group_size))

"""Calls of the differentiable functions of modulated norms: known, handed on, or checked."""

from __future__ import annotations

from typing import Any

from ...calls import native, road
from ...calls.traced import is_dynamo_compiling
from ..operands import ModulatedOperands, ModulatedOptions
from ..plain_calls import handed_on, is_handed_on, normalise_family
from . import row


def normalise(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """Run a call of a public function."""
    result = None if is_dynamo_compiling() else native.calls.modulated.normalise(operands, options)
    if result is not None:
        return result
    if is_handed_on(operands):
        args = road.named(row.CALLS, operands, options)
        return handed_on(row.CALLS.functions[options[0]], operands, args, positional=3)
    row.check_gate(operands)
    return normalise_family(row.CALLS, operands, options)

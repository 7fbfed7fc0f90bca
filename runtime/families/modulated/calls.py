"""Calls of the differentiable functions of modulated norms: known, handed on, or checked."""

from __future__ import annotations

from typing import Any

from ...calls import road
from ...calls.record import records
from ...calls.traced import is_dynamo_compiling
from ..operands import ModulatedOperands, ModulatedOptions
from ..plain_calls import handed_on, is_handed_on, normalise_family
from . import row


def normalise(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """Run a call of a public function; the last option is set here."""
    options = (*options[:-1], records(operands))
    result = None if is_dynamo_compiling() else road.normalise_known(row.CALLS, operands, options)
    if result is not None:
        return result
    if is_handed_on(operands):
        args = road.named(row.CALLS, operands, options)
        return handed_on(row.CALLS.functions[options[0]], operands, args, positional=3)
    row.check_gate(operands)
    return normalise_family(row.CALLS, operands, options)

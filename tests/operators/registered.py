"""The operators of plain norms, by the norm's word."""

from __future__ import annotations

from typing import Any

import torch

from normforge.codegen import parameters

Operator = torch._ops.OpOverload[Any, Any]


def _operator(name: str) -> Operator:
    operator: Operator = getattr(torch.ops.normforge, name).default
    return operator


FORWARD = {norm.value: _operator(name) for norm, name in parameters.FORWARD.functions.items()}
FORWARD_INTO = {norm.value: _operator(f"{name}_into") for norm, name in parameters.FORWARD.functions.items()}
BACKWARD = {norm.value: _operator(name) for norm, name in parameters.BACKWARD.functions.items()}


def by_name(operator: Any, values: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by their names in its schema."""
    return dict(zip([argument.name for argument in operator._schema.arguments], values, strict=True))

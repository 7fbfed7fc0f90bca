"""From a mode to the arguments of a call that takes it: the way back from what a call's check finds out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .codegen.families import Kind, Parameter
from .codegen.model import Mode
from .codegen.parameters import family_of
from .dtypes import TORCH_DTYPES

# What stands for a number that is not 0: how likely elements are dropped.
_NUMBER = 0.25


def arguments_of(mode: Mode, make: Callable[[Parameter], torch.Tensor | None]) -> dict[str, Any]:
    """The arguments of a call of a mode, by name: the words, flags and types that it is, and the tensors that it reads.

    Numbers keep their defaults, unless the mode says that there is one, and outputs are allocated.

    Args:
        mode: what is to be called.
        make: makes a tensor that the mode reads; None leaves it out, where it may be.
    """
    arguments: dict[str, Any] = {}
    for parameter in family_of(mode).of(mode.norm):
        if parameter.kind is Kind.PLACE or not parameter.is_wanted(mode):
            continue
        if parameter.kind.is_tensor:
            tensor = make(parameter)
            if tensor is not None:
                arguments[parameter.name] = tensor
        elif parameter.kind is Kind.NUMBER and parameter.wanted:
            arguments[parameter.name] = _NUMBER
        elif parameter.axis:
            value = getattr(mode, parameter.axis)
            arguments[parameter.name] = TORCH_DTYPES[value] if parameter.kind is Kind.DTYPE else value
    return arguments

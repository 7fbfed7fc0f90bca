"""Random illegal calls: a legal one with one thing wrong, by the tables of what is wrong with one argument."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..calls.test_wrong_tensors import VALUES, WRONG, is_refused
from .problems import Choose, MadeCall


def spoilt(choose: Choose, made: MadeCall) -> dict[str, Any] | None:
    """A call's arguments with one thing wrong; None where what was chosen to be wrong does not apply."""
    given = made.arguments
    if choose((False, True)):
        name = choose([name for name in inspect.signature(made.function).parameters if name in VALUES])
        return given | {name: choose(VALUES[name][0])}
    name = choose([name for name, each in given.items() if isinstance(each, torch.Tensor)])
    tensor, wrong = given[name], choose([*WRONG])
    # A tensor of one column or of no row is as long without its last, and has its memory.
    if tensor.shape[-1] < 2 or not tensor.numel() or not is_refused("", name, tensor, wrong):
        return None
    return given | {name: WRONG[wrong][0](tensor)}

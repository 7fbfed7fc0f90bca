"""A problem that is ready to run, and what a run of the command line found out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..selection.table import Entry
from .compare import Finding

Outputs = TypeVar("Outputs", bound="tuple[Any, ...]")


@dataclass(frozen=True)
class Run(Generic[Outputs]):
    """A problem with its tensors, to be called again and again.

    Attributes:
        entry: the instance that serves it.
        call: computes the outputs.
        validate: how far outputs are from the fp64 reference.
        operands: what a call reads, tensors and others.
    """

    entry: Callable[[], Entry]
    call: Callable[[], Outputs]
    validate: Callable[[Outputs], tuple[Finding, ...]]
    operands: tuple[object, ...]

    def moved(self, outputs: Outputs) -> int:
        """Bytes a call moves: every tensor read or written, once."""
        return _bytes(self.operands) + _bytes(outputs)


class Result(NamedTuple):
    """What a run found out.

    Attributes:
        instance: the table entry that served it.
        kernel: the symbol of the kernel that it took.
        findings: how far each output is from the reference; empty if it was not validated.
        ms: the median time on a GPU, or one run's in the interpreter.
        gb_per_s: bytes moved over that time; None in the interpreter.
    """

    instance: str
    kernel: str
    findings: tuple[Finding, ...]
    ms: float
    gb_per_s: float | None


def _bytes(values: Iterable[object]) -> int:
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

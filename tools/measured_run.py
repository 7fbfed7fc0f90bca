"""A problem with its tensors: called, compared with the reference, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..kernels.gpu import target_of
from ..selection.table import Entry
from .compare import Finding
from .machine import Machine
from .timing import median_ms

Outputs = TypeVar("Outputs", bound="tuple[Any, ...]")


@dataclass(frozen=True)
class Run(Generic[Outputs]):
    """A problem with its tensors, to be called again and again.

    Attributes:
        names: the instance and the kernel that served it, once it has been called.
        call: computes the outputs.
        validate: how far outputs are from the fp64 reference.
        operands: what a call reads, tensors and others.
    """

    names: Callable[[], tuple[str, str]]
    call: Callable[[], Outputs]
    validate: Callable[[Outputs], tuple[Finding, ...]]
    operands: tuple[object, ...]

    def moved(self, outputs: Outputs) -> int:
        """Bytes a call moves: every tensor read or written, once."""
        return _bytes(self.operands) + _bytes(outputs)


class Result(NamedTuple):
    """The result of a run.

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


def measured(run: Run[Any], machine: Machine, *, validate: bool, warmup: int, repeat: int) -> Result:
    """Call a run, validate it, and time it."""
    begin = time.perf_counter()
    outputs = run.call()
    interpreted_ms = (time.perf_counter() - begin) * 1e3
    findings = run.validate(outputs) if validate else ()
    ms = interpreted_ms if machine.interpreted else median_ms(run.call, warmup=warmup, repeat=repeat)
    rate = None if machine.interpreted else run.moved(outputs) / ms / 1e6
    return Result(*run.names(), findings, ms, rate)


def names_of(entry: Entry, rows: int, n: int, device: torch.device) -> tuple[str, str]:
    """Return the names of an instance of rows of n, and of the kernel that serves so many rows."""
    return entry.name, entry.kernel(entry.tile(rows, n, target_of(device).arch).pipeline)


def _bytes(values: Iterable[object]) -> int:
    # One tensor may be the gradient of x and of a residual alike.
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

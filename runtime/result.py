"""What a run of the command line found out."""

from __future__ import annotations

from typing import NamedTuple

from .compare import Finding


class Result(NamedTuple):
    """What a run found out.

    Attributes:
        instance: the table entry that served it.
        kernel: that entry's kernel symbol.
        findings: how far each output is from the reference; empty if it was not validated.
        ms: the median time on a GPU, or one run's in the interpreter.
        gb_per_s: bytes moved over that time; None in the interpreter.
    """

    instance: str
    kernel: str
    findings: tuple[Finding, ...]
    ms: float
    gb_per_s: float | None

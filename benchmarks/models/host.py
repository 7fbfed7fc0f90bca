"""The command `model-host`: what the norms of a model's step take of the host where they stand, variant by variant.

A call that is timed again and again has all of Python's code and data in the processor's caches. In a model other parts
run in between, and each norm finds them elsewhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import nn

from normforge.errors import DeviceError
from normforge.tools.machine import find_machine

from ..environment import describe
from ..errors import UsageError
from ..timing import Spread, summarise
from .command import chosen_names
from .names import BF16, DECODE, EAGER
from .specs import SPECS
from .steps import Step
from .variants import VARIANTS, NotOfferedError, versions
from .worker import Job, Session, offered

# The turns that variants take; steps before those that are timed, and a turn's. A tiny model's cache is short.
_TURNS = 3
_STEPS = {"cuda": (4, 16), "cpu": (1, 1)}


class Taken(NamedTuple):
    """The host time of a variant, in microseconds.

    Attributes:
        norms: how many calls of norms a step has.
        norm: of one such call, its module's forward alone.
        step: of a step, in which nothing else is timed.
    """

    norms: int
    norm: Spread
    step: Spread


def model_host(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: measure, and print what ran and a table.

    Raises:
        UsageError: there is no device, or an option names nothing.
    """
    try:
        machine = find_machine()
    except DeviceError as error:
        raise UsageError(str(error)) from None
    models = chosen_names("--models", options.models, SPECS)
    variants = chosen_names("--variants", options.variants, VARIANTS)
    size = "tiny" if machine.interpreted else "full"
    header = describe(machine, (), options.revision) | versions()
    print("\n".join(f"{name}: {value}" for name, value in header.items()))
    for model in models:
        for kind in options.steps:
            if offered(model, BF16, kind, EAGER):
                job = Job(model, BF16, (EAGER,), (kind,), variants, size, machine.device.type, "", header)
                print(f"\n{table(model, kind, measured(job))}")
    return 0


def measured(job: Job) -> dict[str, Taken]:
    """Return the host time of each variant of a job, and report variants that have nothing to measure."""
    session = Session(job)
    warm_up, count = _STEPS[job.device]
    ((kind, _),) = job.groups
    step = session.step(kind)
    steps: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {}
    for name in job.variants:
        if VARIANTS[name].passes:
            _skip(job, name, "it is run compiled alone")
            continue
        try:
            session.varied(name)
        except (NotOfferedError, ImportError) as missing:
            _skip(job, name, str(missing))
            continue
        steps[name], calls[name] = [], []
    for _turn in range(_TURNS):
        for name in steps:
            varied = session.varied(name)
            step.begin(varied.model)
            with varied.within():
                _run(step, varied.model, warm_up, session.device)
                steps[name] += _run(step, varied.model, count, session.device)
                with _timing_norms(varied.model, calls[name]):
                    _run(step, varied.model, count, session.device)
    for name in steps:
        if not calls[name]:
            _skip(job, name, "no module that is called a norm is run in it")
    return {
        name: Taken(len(calls[name]) // (_TURNS * count), summarise(calls[name]), summarise(steps[name]))
        for name in steps
        if calls[name]
    }


def _skip(job: Job, name: str, why: str) -> None:
    print(f"skipped: {job.model}, {name}: {why}", file=sys.stderr)


def table(model: str, kind: str, found: dict[str, Taken]) -> str:
    """Return the host time of variants in microseconds; a step counts the host's part alone."""
    headers = ["µs on the host", "calls of norms", "a norm", "fifths", "a step", "fifths"]
    rows = [
        (
            VARIANTS[name].label,
            taken.norms,
            *(
                text
                for spread in (taken.norm, taken.step)
                for text in (f"{spread.median:.1f}", f"{spread.p20:.1f}, {spread.p80:.1f}")
            ),
        )
        for name, taken in found.items()
    ]
    aligned = ("left", *["right"] * (len(headers) - 1))
    shown = tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=aligned)
    return f"**{'Decode' if kind == DECODE else 'Training'} step of {model}, bf16, eager**\n\n{shown}"


def is_norm(module: nn.Module) -> bool:
    """Return True if a module's class is named as a norm."""
    return any(word in type(module).__name__ for word in ("LayerNorm", "RMSNorm"))


@contextmanager
def _timing_norms(model: nn.Module, into: list[float]) -> Iterator[None]:
    """Have each norm's forward say how long it took, in microseconds; what is fused with a norm is not meanwhile."""
    norms = [module for module in model.modules() if is_norm(module)]
    try:
        for norm in norms:
            vars(norm)["forward"] = _timed(norm.forward, into)
        yield
    finally:
        for norm in norms:
            del vars(norm)["forward"]


def _timed(forward: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter_ns()
        found = forward(*given, **named)
        into.append((time.perf_counter_ns() - start) / 1e3)
        return found

    return timed


def _run(step: Step, model: nn.Module, steps: int, device: torch.device) -> list[float]:
    """Microseconds of the host for some steps, waiting for the GPU behind each so that it is never far behind."""
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        step.step(model)
        times.append((time.perf_counter_ns() - start) / 1e3)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return times

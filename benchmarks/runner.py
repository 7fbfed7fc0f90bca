"""Runs a suite: prepares every provider of a cell, checks what it computes, times them in turn, and saves."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from .cells import Cell, Suite
from .inputs import Inputs, make_inputs
from .oracle import check, expect
from .progress import progress_over
from .provider import Provider
from .results import CEILING, OK, PROJECT, Results, Row, make_row
from .timing import INPUT_SETS, Call, measure, summarise

_LONGEST_REASON = 200
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class ContextLostError(Exception):
    """The GPU answers nothing more in this process; what was measured is saved, the culprit's failure included.

    Attributes:
        provider: the culprit's name.
        cell: where it was.
    """

    def __init__(self, provider: str, cell: Cell, why: str) -> None:
        super().__init__(f"{provider} on {cell.id}: {why}")
        self.provider = provider
        self.cell = cell


@dataclass(frozen=True)
class Plan:
    """How a run goes.

    Attributes:
        device: where.
        providers: by name; each is timed on every cell that it offers.
        out: the folder of the results.
        budget_ms: device time of one provider on one cell, its share of clearing L2 included.
        rounds: how often the providers of a cell take turns within that, so that a drift of the clocks meets all.
        retry: whether recorded failures are tried again.
        deadline: of `time.monotonic`; no cell is begun after it. None is no limit.
    """

    device: torch.device
    providers: Mapping[str, Provider]
    out: Path
    budget_ms: float = 50.0
    rounds: int = 2
    retry: bool = False
    deadline: float | None = None


def due(suite: Suite, cells: Sequence[Cell], results: Results, plan: Plan) -> list[tuple[Cell, list[Provider]]]:
    """Return what is left to measure: cells, each with the providers that offer the cell and have no row yet."""
    left = []
    for cell in cells:
        rows = results.of(cell.id)
        done = {name for name, row in rows.items() if row.ok or not plan.retry}
        offering = {name: p for name, p in plan.providers.items() if p.builder(cell) is not None}
        missing = [p for name, p in offering.items() if name not in done and (name != CEILING or suite.has_ceiling)]
        if missing:
            left.append((cell, missing))
    return left


def run_suite(suite: Suite, cells: Sequence[Cell], results: Results, plan: Plan) -> int:
    """Measure what is due and save after every cell.

    Returns:
        How many cells were left when the time was up.

    Raises:
        ContextLostError: a provider has made the GPU unusable for this process.
    """
    blame(suite, cells, results, plan)
    left = due(suite, cells, results, plan)
    with progress_over(left, what=suite.name, unit="cell") as progress:
        for position, (cell, providers) in enumerate(progress):
            if plan.deadline is not None and time.monotonic() > plan.deadline:
                return len(left) - position
            progress.set_postfix_str(cell.id, refresh=False)
            try:
                run_cell(suite, cell, providers, plan, results.add)
            except ContextLostError as lost:
                _leave_out(lost, left[position + 1 :], results)
                raise
            finally:
                results.save(plan.out)
                running(plan.out, suite.name).unlink(missing_ok=True)
            release(plan.device)
            if plan.device.type == "cuda":
                keep_what_is_loaded()
    return 0


def _leave_out(lost: ContextLostError, left: Sequence[tuple[Cell, list[Provider]]], results: Results) -> None:
    """Record that a peer is not tried on more cells of the kind that it lost the GPU on, each at a process's cost."""
    if lost.provider == PROJECT:
        return
    for cell, providers in left:
        alike = (cell.task, cell.kind) == (lost.cell.task, lost.cell.kind)
        if alike and any(provider.name == lost.provider for provider in providers):
            results.add(make_row(cell, lost.provider, f"fails: not tried, for it lost the GPU on {lost.cell.id}"))


def run_cell(
    suite: Suite, cell: Cell, providers: Sequence[Provider], plan: Plan, record: Callable[[Row], None]
) -> None:
    """Measure providers on one cell; one that raises gets a row that says so, and the others go on.

    Raises:
        ContextLostError: see `run_suite`; the row is recorded first.
    """
    for provider in providers:
        if provider.reset is not None:
            provider.reset()
    inputs = [make_inputs(cell, plan.device, copy) for copy in range(INPUT_SETS[suite.method])]
    expected = expect(inputs[0])
    ready: dict[str, list[Call]] = {}
    times: dict[str, list[float]] = {provider.name: [] for provider in providers}
    for provider in providers:
        with _recording(suite, provider, cell, plan, record):
            ready[provider.name] = prepare(provider, inputs, expected)
    del expected
    for _ in range(plan.rounds):
        for provider in providers:
            if provider.name in ready:
                calls = ready.pop(provider.name)
                with _recording(suite, provider, cell, plan, record):
                    times[provider.name] += measure(suite.method, calls, plan.device, plan.budget_ms / plan.rounds)
                    ready[provider.name] = calls
    for provider in providers:
        if provider.name in ready:
            record(make_row(cell, provider.name, OK, summarise(times[provider.name])))


def running(folder: Path, suite: str) -> Path:
    """Return the file that names the running provider and cell; it outlives a process that crashes."""
    return folder / f"{suite}.running"


def blame(suite: Suite, cells: Sequence[Cell], results: Results, plan: Plan) -> None:
    """Record the provider that the process before this one died of, so that this one does not die of it too."""
    plan.out.mkdir(parents=True, exist_ok=True)
    mark = running(plan.out, suite.name)
    if not mark.exists():
        return
    culprit, name = mark.read_text().splitlines()
    for cell in cells:
        if cell.id == culprit and name in plan.providers:
            results.add(make_row(cell, name, "fails: the process crashed or was killed while this ran"))
    results.save(plan.out)
    mark.unlink()


@contextmanager
def _recording(
    suite: Suite, provider: Provider, cell: Cell, plan: Plan, record: Callable[[Row], None]
) -> Iterator[None]:
    """Turn what a peer raises into a row: it is a result, not the end of the run."""
    running(plan.out, suite.name).write_text(f"{cell.id}\n{provider.name}\n")
    try:
        yield
    except Exception as error:
        record(make_row(cell, provider.name, f"fails: {first_line(error)}"))
        # The traceback holds on to the tensors of the frames it names.
        error.__traceback__ = None
        _require_context(provider, cell, plan.device)


def prepare(provider: Provider, inputs: Sequence[Inputs], expected: Mapping[str, torch.Tensor] | None) -> list[Call]:
    """Make a provider's call for each set of inputs, and hold the first one's outputs against the oracle's.

    Without `expected` they are computed and not compared.

    Raises:
        WrongOutputError: an output is wrong.
        Exception: whatever the provider raises.
    """
    cell = inputs[0].cell
    builder = provider.builder(cell)
    assert builder is not None, f"{provider.name} was asked for {cell.id}, which it does not offer"
    prepared = [builder(each) for each in inputs]
    for position, one in enumerate(prepared):
        outputs = one.outputs(one.call())
        if position == 0 and expected is not None and outputs:
            check(outputs, expected, inputs[0], dict.fromkeys(outputs, one.allowance) | dict(provider.allowances))
    return [one.call for one in prepared]


def release(device: torch.device) -> None:
    """Wait for the GPU, and give back the memory of what is no longer referenced.

    Raises:
        RuntimeError: the GPU is lost to this process, by an illegal access for example.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@cache
def keep_what_is_loaded() -> None:
    """Have later collections pass by what the first cell loaded: to look through it took 0.2 s behind every cell."""
    gc.freeze()


def first_line(error: BaseException) -> str:
    """Return what went wrong, in a line of a table."""
    plain = _COLOURS.sub("", str(error))
    text = next((line.strip() for line in plain.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:_LONGEST_REASON].rstrip(": ")


def _require_context(provider: Provider, cell: Cell, device: torch.device) -> None:
    # An illegal access leaves every later call of the process failing, and would be blamed on all that follow.
    try:
        release(device)
    except Exception as error:
        raise ContextLostError(provider.name, cell, first_line(error)) from None

"""One process of the benchmark of models: one model in one dtype, either all of its eager steps or all compiled ones.

    python -m benchmarks.models.worker JOB

JOB is a `Job` as JSON. Variants are prepared and checked one by one, and then timed in turns, so that a slow minute of
the machine is no single variant's. Rows are saved once all variants of a step are timed; what cannot be timed is saved
at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..compile_ahead import compile_beside_others
from ..oracle import WrongOutputError
from ..provider import load as load_package
from ..results import OK
from ..runner import first_line, release
from ..timing import summarise
from .check import Off, Outcome, Yardstick, check, make_yardstick
from .names import ABSENT, BF16, COMPILE, DECODE, EAGER, FAILS, GRAPHS, NOTHING, SUITE, TRAIN, WRONG, Key
from .specs import SPECS, Shape, Spec, make
from .steps import DecodeStep, Step, TrainStep, graphs_made, graphs_skipped, made_to_run, peak_gib, time_turn
from .table import Row, Table, extend, load
from .variants import VARIANTS, NotOfferedError, Varied, vary

# The exit status of a process that the GPU answers no more.
LOST = 3

# Before one is timed: what compiles may see something new in its second call, and records a CUDA graph after it.
_CALLS = {EAGER: 2, COMPILE: 2, GRAPHS: 4}

# Variants share the code that TorchDynamo compiles, so that each is one more version of it.
_VERSIONS = 256


@dataclass(frozen=True)
class Job:
    """The work of one process.

    Attributes:
        model: a name of `SPECS`.
        dtype: `bf16` or `autocast`.
        runs: which of `eager`, `compile` and `graphs`.
        steps: which of `train` and `decode`.
        variants: names of `VARIANTS`.
        size: `full`, `quick` or `tiny`, an attribute of `Spec`.
        device: `cuda` or `cpu`.
        out: the folder of the table.
        header: the table's.
        rounds: turns of each variant.
        deadline: of `time.time()`: no variant is begun after it; None is no limit.
        ahead: whether to prepare only, so that what is compiled lies in the caches of a process that times.
    """

    model: str
    dtype: str
    runs: tuple[str, ...]
    steps: tuple[str, ...]
    variants: tuple[str, ...]
    size: str
    device: str
    out: str
    header: dict[str, str]
    rounds: int = 5
    deadline: float | None = None
    ahead: bool = False

    @property
    def groups(self) -> list[tuple[str, str]]:
        """Steps and ways of running them, in the order they are done."""
        return [(step, run) for step in self.steps for run in self.runs if offered(self.model, self.dtype, step, run)]

    @property
    def keys(self) -> list[Key]:
        """The rows that it makes."""
        return [
            Key(self.model, self.dtype, step, run, variant)
            for step, run in self.groups
            for variant in self.variants
            if run != EAGER or not VARIANTS[variant].passes
        ]

    @property
    def late(self) -> bool:
        """Return True if the time is up."""
        return self.deadline is not None and time.time() > self.deadline

    @property
    def mark(self) -> Path:
        """The file that says which row is being worked on; it outlives a process that crashes."""
        return Path(self.out) / f"{SUITE}.{self.model}.running"

    def text(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))


def read_job(text: str) -> Job:
    """Return the job that `Job.text` wrote."""
    given: dict[str, Any] = json.loads(text)
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Job(**values)


def offered(model: str, dtype: str, step: str, run: str) -> bool:
    """Return True if the model has such a step.

    Decoding is timed in bf16 alone: under autocast rotary keys are fp32 and values bf16, which transformers' static
    cache refuses. Only decode steps are short enough for CUDA graphs to matter.
    """
    if step == DECODE:
        return SPECS[model].decoding is not None and dtype == BF16
    return run != GRAPHS


@dataclass
class _Ready:
    """A variant that was checked, and how to run its step."""

    varied: Varied
    call: Callable[[], Any]
    off: Off
    loss: float | None
    memory_gib: float | None
    note: str
    times: list[float]


class Session:
    """A model on a device, its variants, and its steps, each made once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.spec: Spec = SPECS[job.model]
        self.shape: Shape = getattr(self.spec, job.size)
        self.device = torch.device(job.device)
        self._varied: dict[str, Varied] = {}
        self._steps: dict[str, Step] = {}
        self._yardsticks: dict[str, Yardstick] = {}

    @cached_property
    def base(self) -> nn.Module:
        """The model as torch has it."""
        load_package(self.spec.package)
        dtype = torch.bfloat16 if self.job.dtype == BF16 else torch.float32
        return make(self.spec, self.shape, self.device, dtype)

    def varied(self, name: str) -> Varied:
        """Return a variant of the model."""
        if name not in self._varied:
            self._varied[name] = vary(self.base, self.spec, VARIANTS[name])
        return self._varied[name]

    def step(self, kind: str) -> Step:
        """Return a step of the model's variants."""
        if kind not in self._steps:
            self._steps[kind] = (
                TrainStep(self.spec, self.shape, self.base, self.device, self.job.dtype)
                if kind == TRAIN
                else DecodeStep(self.spec, self.shape, self.base)
            )
        return self._steps[kind]

    def yardstick(self, kind: str) -> Yardstick:
        """Return the result of the model's eager step, and how far nudges move the result."""
        if kind not in self._yardsticks:
            step = self.step(kind)
            step.begin(self.base)

            def run() -> Outcome:
                # Its cache as it was, too.
                step.begin(self.base)
                return step.run(self.base)

            self._yardsticks[kind] = make_yardstick(run, self.base)
        return self._yardsticks[kind]


def work(job: Job) -> int:
    """Make the job's rows that are due.

    Returns:
        How many are left, because the time was up.
    """
    table = load(Path(job.out), job.header) or Table(job.header)
    session = Session(job)
    left = 0
    try:
        for kind, run in job.groups:
            keys = [key for key in table.due(job.keys) if (key.step, key.run) == (kind, run)]
            if keys:
                left += _run_group(session, kind, run, keys)
    finally:
        if not job.ahead:
            job.mark.unlink(missing_ok=True)
    return left


def _run_group(session: Session, kind: str, run: str, keys: list[Key]) -> int:
    job, device = session.job, session.device
    ready: dict[Key, _Ready] = {}
    begun = []
    for key in keys:
        if job.late:
            break
        begun.append(key)
        with _recording(key, session):
            if job.ahead:
                _compile(session, key)
            else:
                ready[key] = _prepare(session, key)
    if job.ahead:
        return len(keys) - len(begun)
    for _ in range(job.rounds):
        # To and fro, since each goes to the end: a card that warms up would be the same variants' loss each time.
        for key in reversed(list(ready)):
            one = ready.pop(key)
            with _recording(key, session):
                step = session.step(kind)
                step.begin(one.varied.model)
                with one.varied.within():
                    one.times += time_turn(one.call, kind, device)
                ready[key] = one
    expected = session.yardstick(kind).expected.loss if ready else None
    extend(Path(job.out), job.header, [_row(key, ready[key], expected) for key in keys if key in ready])
    release(device)
    return len(keys) - len(begun)


def _prepare(session: Session, key: Key) -> _Ready:
    """Make a variant, check its step, and see what memory it takes."""
    step, device = session.step(key.step), session.device
    yardstick = session.yardstick(key.step)
    varied, model, outcome, note = _compile(session, key)
    off = check(outcome, yardstick)
    # It would keep every gradient.
    loss = outcome.loss
    del outcome

    def call() -> None:
        step.step(model)

    step.begin(varied.model)
    with varied.within():
        memory = peak_gib(call, step.drop, varied.model, device) if key.step == TRAIN else None
    return _Ready(varied, call, off, loss, memory, note, [])


def _compile(session: Session, key: Key) -> tuple[Varied, Callable[..., Any], Outcome, str]:
    """Make a variant and run its step until all that compiles has compiled; also what torch would not compile."""
    step, device = session.step(key.step), session.device
    varied = session.varied(key.variant)
    model = made_to_run(varied.model, key.run, device)
    compiles = key.run != EAGER
    made, skipped = (graphs_made(), graphs_skipped()) if compiles else (0, 0)
    for _ in range(_CALLS[key.run] if device.type == "cuda" else 1):
        step.begin(varied.model)
        with varied.within():
            outcome = step.run(model)
    return varied, model, outcome, _note(graphs_made() - made, graphs_skipped() - skipped) if compiles else ""


def _note(made: int, skipped: int) -> str:
    if not made:
        raise RuntimeError("TorchDynamo compiled nothing for it, and ran what it had compiled for another variant")
    notes = [f"{made} graphs"] if made > 1 else []
    return ", ".join(notes + ([f"{skipped} of them no CUDA graph"] if skipped else []))


def _row(key: Key, one: _Ready, torch_loss: float | None) -> Row:
    spread = summarise(one.times)
    return Row(
        *key,
        OK,
        ms=round(spread.median, 4),
        ms_p20=round(spread.p20, 4),
        ms_p80=round(spread.p80, 4),
        runs=spread.runs,
        memory_gib=None if one.memory_gib is None else round(one.memory_gib, 3),
        loss=one.loss,
        torch_loss=torch_loss,
        off=round(one.off.ratio, 4),
        where=one.off.where,
        note=one.note,
    )


@contextmanager
def _recording(key: Key, session: Session) -> Iterator[None]:
    """Turn what goes wrong with a variant into its row, and go on with the others."""
    job = session.job
    # Several processes compile ahead at once, and what fails there fails again.
    if not job.ahead:
        job.mark.parent.mkdir(parents=True, exist_ok=True)
        job.mark.write_text(json.dumps(key))
    try:
        yield
    except Exception as error:
        if not job.ahead:
            extend(Path(job.out), job.header, [Row(*key, _status(error))])
        # The traceback holds on to the tensors of the frames it names.
        error.__traceback__ = None
        try:
            release(session.device)
        except Exception as lost:
            print(f"the GPU was lost to {'/'.join(key)}: {first_line(lost)}", file=sys.stderr)
            raise SystemExit(LOST) from None


def _status(error: Exception) -> str:
    if isinstance(error, NotOfferedError):
        return f"{NOTHING}: {error}"
    if isinstance(error, WrongOutputError):
        return f"{WRONG}: {error}"
    if isinstance(error, ImportError):
        return f"{ABSENT}: {first_line(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"{FAILS}: out of memory: {first_line(error)}"
    return f"{FAILS}: {first_line(error)}"


def prepare_compiler(*, ahead: bool = False) -> None:
    """Let TorchDynamo keep a version for each variant, and fail rather than run one eagerly once there are too many.

    Args:
        ahead: whether other processes share the GPU. Which of several kernels was fastest means nothing then: Inductor
            does not keep it, and the process that times chooses.
    """
    import torch._dynamo.config as config

    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(_VERSIONS, getattr(config, name)))
    config.fail_on_recompile_limit_hit = True
    if ahead:
        compile_beside_others()


if __name__ == "__main__":
    given = read_job(sys.argv[1])
    prepare_compiler(ahead=given.ahead)
    print(json.dumps(work(given)))

"""The command `model-kernels`: a step of each variant under Nsight Compute.

    python -m benchmarks.models.profile JOB ORDER

is one of these processes, for one model: it prepares steps as `worker` does, lets the profiler see one of each
variant, and writes to the file ORDER which ones these were.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from normforge.errors import DeviceError
from normforge.tools.machine import Machine, find_machine

from ..chosen import RESULTS
from ..environment import ROOT, describe, folder_name
from ..errors import UsageError
from .command import chosen_names, gpus_of
from .kernels import METRICS, Row, launches_in, load, render, save, summed
from .names import EAGER
from .specs import SPECS
from .steps import made_to_run
from .variants import VARIANTS, NotOfferedError, versions
from .worker import Job, Session, offered, prepare_compiler, read_job

# Before the step that is seen: what compiles, and Triton's kernels, are loaded by then.
_WARM_UP = 3
_SKIPPED = "skipped:"


def model_kernels(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: profile, write `kernels.csv` anew, and print their tables.

    Returns:
        0, or 1 if a process failed.

    Raises:
        UsageError: there is no GPU or no Nsight Compute, or an option names nothing.
    """
    machine = _require_gpu()
    profiler = shutil.which("ncu")
    if profiler is None:
        raise UsageError("model-kernels needs ncu, Nsight Compute's command, and there is none in PATH; install it")
    header = describe(machine, (), options.revision) | versions()
    out = options.out or RESULTS / f"{folder_name(machine)}-models"
    models = chosen_names("--models", options.models, SPECS)
    variants = chosen_names("--variants", options.variants, VARIANTS)
    size = "quick" if options.quick else "full"
    jobs = [
        Job(model, dtype, (run,), (step,), variants, size, machine.device.type, str(out.resolve()), header)
        for model in models
        for dtype in options.dtypes
        for step in options.steps
        for run in options.runs
        if offered(model, dtype, step, run)
    ]
    done = load(out)
    rows = [] if done is None or options.fresh or done[0] != header else done[1]
    profiled = {(row.model, row.dtype, row.step, row.run) for row in rows}
    due = [job for job in jobs if (job.model, job.dtype, *job.steps, *job.runs) not in profiled]
    free: SimpleQueue[str] = SimpleQueue()
    gpus = gpus_of(machine)
    for gpu in gpus:
        free.put(gpu)

    def run(job: Job) -> list[Row] | str:
        gpu = free.get()
        try:
            return _profiled(profiler, replace(job, gpu=gpu))
        finally:
            free.put(gpu)

    failed = []
    with ThreadPoolExecutor(len(gpus)) as pool:
        for job, found in zip(due, pool.map(run, due), strict=True):
            if isinstance(found, str):
                failed.append(f"{', '.join((job.model, job.dtype, *job.steps, *job.runs))}: {found}")
            else:
                rows += found
                save(out, header, rows)
    print(render(rows, models))
    for said in failed:
        print(f"error: {said}", file=sys.stderr)
    return 1 if failed else 0


def _profiled(profiler: str, job: Job) -> list[Row] | str:
    """Return a job's rows, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="normforge-ncu-") as folder:
        log, order = Path(folder) / "log", Path(folder) / "order"
        # Caches are left as the kernel before leaves them, as in a step, and so are the clocks. One pass counts both
        # metrics: no kernel is run twice on memory that has to be put back.
        command = [profiler, "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS)]
        command += ["--profile-from-start", "off", "--cache-control", "none", "--clock-control", "none"]
        command += ["--target-processes", "application-only", "--log-file", str(log)]
        command += [sys.executable, "-m", "benchmarks.models.profile", job.text(), str(order)]
        # The profiler's lock, of which there is one a folder: jobs have GPUs of their own.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": job.gpu, "TMPDIR": folder}
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", cache_dir())
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        print(
            "".join(line for line in ran.stderr.splitlines(True) if line.startswith(_SKIPPED)), end="", file=sys.stderr
        )
        if ran.returncode:
            return f"ended with status {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-300:]}"
        try:
            steps = launches_in(log.read_text())
        except UsageError as error:
            return str(error)
        about = [(job.model, job.dtype, *job.steps, *job.runs, name) for name in order.read_text().splitlines()]
        if len(steps) != len(about):
            return f"{len(about)} steps were run, and the profiler saw {len(steps)}"
        return [row for one, launches in zip(about, steps, strict=True) for row in summed(one, launches)]


def show_steps(job: Job, order: Path) -> None:
    """Run each variant of the job's step once where the profiler looks, behind a mark, and write their order down."""
    session = Session(job)
    ((kind, run),) = job.groups
    step = session.step(kind)
    shown = []
    for name in job.variants:
        if run == EAGER and VARIANTS[name].passes:
            continue
        try:
            varied = session.varied(name)
        except (NotOfferedError, ImportError) as missing:
            print(f"{_SKIPPED} {job.model}, {run}, {name}: {missing}", file=sys.stderr)
            continue
        model = made_to_run(varied.model, run, session.device)
        step.begin(varied.model)
        with varied.within():
            for _ in range(_WARM_UP):
                step.step(model)
            with _seen():
                step.step(model)
        shown.append(name)
    order.write_text("\n".join(shown))


@contextmanager
def _seen() -> Iterator[None]:
    """Let the profiler look, from a mark on."""
    cuda: Any = torch.cuda
    cuda.synchronize()
    cuda.profiler.start()
    cuda._sleep(1)
    yield
    cuda.synchronize()
    cuda.profiler.stop()


def _require_gpu() -> Machine:
    try:
        machine = find_machine()
    except DeviceError as error:
        raise UsageError(str(error)) from None
    if machine.device.type != "cuda":
        raise UsageError("model-kernels shows what ran on a GPU, and there is none here, or TRITON_INTERPRET is set")
    return machine


if __name__ == "__main__":
    given = read_job(sys.argv[1])
    prepare_compiler()
    show_steps(given, Path(sys.argv[2]))

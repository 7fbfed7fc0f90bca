"""Processes of a group: `run` starts them, and each runs the cases that it was told, in order."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

# How many processes the group has.
WORLD = int(os.environ.get("WORLD_SIZE", "2"))

# Where the ranks' tensors are: each rank of "cuda" has a card of its own.
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Of a rank that waits for another, which failed.
WAIT = datetime.timedelta(seconds=60)


class Cases(dict[str, Callable[[], None]]):
    """The cases of a module, by name."""

    def case(self, function: Callable[[], None]) -> Callable[[], None]:
        """List a case."""
        self[function.__name__] = function
        return function


def run(world: int, modules: list[str], folder: Path, *, limit: float, device: str = "cpu") -> dict[str, str]:
    """What became of each case, in a group of so many processes: "" if it passed on every rank, else an error.

    Args:
        world: how many processes.
        modules: the modules of this package whose cases are run.
        folder: where the processes meet; an empty one.
        limit: seconds, after which they are ended.
        device: `cpu`, where kernels are interpreted, or `cuda`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), "RANKS_DEVICE": device}
    environment |= {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    command = [sys.executable, "-m", __name__, str(folder / "store"), *modules]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    found: dict[str, str] = {}
    for rank, process in enumerate(processes):
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            said, _ = process.communicate()
        for line in said.splitlines():
            name, error = json.loads(line)
            found[name] = found.get(name, "") + (error and f"rank {rank}: {error}")
    return found


def main(store: str, modules: list[str]) -> None:
    """Join the group, and print a line for each case: its name, and its error or nothing."""
    torch.set_num_threads(1)
    if DEVICE != "cpu":
        torch.cuda.set_device(_rank())
        torch.set_default_device(torch.device(DEVICE, _rank()))
    dist.init_process_group(
        _BACKENDS[DEVICE], init_method=f"file://{store}", rank=_rank(), world_size=WORLD, timeout=WAIT
    )
    if DEVICE == "cpu":
        from .. import quick_interpreter

        quick_interpreter.install()
    # What is printed besides is not to be read as a case.
    lines, sys.stdout = sys.stdout, sys.stderr
    for module in modules:
        for name, case in importlib.import_module(f"{__package__}.{module}").CASES.items():
            torch.manual_seed(0)
            error = ""
            try:
                case()
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps([name, error]), file=lines, flush=True)
            if error:
                # The others have fallen out of step with this one.
                os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def _rank() -> int:
    return int(os.environ["RANK"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

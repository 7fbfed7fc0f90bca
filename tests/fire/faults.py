"""Children that are killed, refused by the system, or run beside one another, at every step that changes a file."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

# Whether the process is killed, or the system call refused, at a step.
KILL, NO_SPACE = "kill", "no_space"

_MOST_STEPS = 200
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate")


def child(work: Callable[[], int], errors: Path = Path(os.devnull)) -> ForkProcess:
    """Begin some work in a child that shares this process's state, and ends with the work's status."""

    def run() -> None:
        with errors.open("a") as out, redirect_stdout(out), redirect_stderr(out):
            status = work()
        sys.exit(status)

    process = get_context("fork").Process(target=run)
    process.start()
    return process


def ended(process: ForkProcess) -> int:
    """Wait for a child, and return its exit status; a signal's number, negative, if that ended it."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def at_step(stop: int, fault: str, work: Callable[[], int], below: Path) -> Callable[[], int]:
    """Some work that meets a fault before its nth step that changes a file below a folder, seen by an audit hook."""

    def with_fault() -> int:
        steps = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal steps
            if event not in _EVENTS or (event == "open" and not (arguments[2] or 0) & _WRITING):
                return
            # A file may be named by its descriptor, too.
            if isinstance(arguments[0], int) or not os.fsdecode(arguments[0]).startswith(str(below)):
                return
            steps += 1
            if steps == stop:
                if fault == KILL:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        sys.addaudithook(hook)
        status = work()
        # Says that the work had fewer steps.
        return status if steps >= stop else FINISHED + status

    return with_fault


# Added to the status of work that ended before it came to the step.
FINISHED = 50


def at_each_step(fault: str, work: Callable[[], int], below: Path, errors: Path = Path(os.devnull)) -> Iterator[int]:
    """Have some work meet a fault before its first step, its second, and so on to its last: how it ended each time."""
    for step in range(1, _MOST_STEPS):
        status = ended(child(at_step(step, fault, work, below), errors))
        if status == FINISHED:
            assert step > 5, "hardly a step was met"
            return
        assert status in ((-signal.SIGKILL,) if fault == KILL else (0, 2))
        yield status
    raise AssertionError("it never ended")

"""Run a long list of cases in parts: `--minutes N` limits a part, and `--resume FILE` keeps results for later parts.

`--only GLOBS` chooses cases by name, `--list` prints the names, and `--jobs N` says how many cases run at once.

FILE begins with the header that its results hold for. A part with another header is refused, so that one file is the
evidence for one revision and one machine. Imports nothing beyond Python, as `proving.evidence` does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.errors import UsageError

C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Found(Generic[R]):
    """The results of this part and of earlier ones.

    Attributes:
        results: by the name of a case, in the order of the cases.
        left: the number of cases without a result.
        seconds: the time of all parts together.
    """

    results: Mapping[str, R]
    left: int
    seconds: float


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def add_options(parser: argparse.ArgumentParser, jobs: int) -> None:
    """Add --only, --list, --jobs, with a default, --minutes and --resume to a command."""
    parser.add_argument(
        "--only", default="*", metavar="GLOBS", help="cases whose name matches one of them, 'rows-*,amax-*' say"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run none")
    parser.add_argument(
        "--jobs", type=_positive, default=jobs, metavar="N", help="how many run at once (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no case after this time")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="leave out cases with a result in FILE, and add results to FILE"
    )


def chosen(
    cases: Mapping[str, C],
    parser: argparse.ArgumentParser,
    asked: argparse.Namespace,
    about: Callable[[C], str] = lambda case: "",
) -> dict[str, C]:
    """Return the cases that --only names; print their names, and what they are about, and exit if --list asks for it.

    Args:
        cases: all cases, by name.
        parser: the command's.
        asked: options that `add_options` added.
        about: says what a case is about.
    """
    globs = [glob.strip() for glob in asked.only.split(",")]
    found = {name: case for name, case in cases.items() if any(fnmatchcase(name, glob) for glob in globs)}
    if not found:
        parser.error(f"--only {asked.only!r} matches no case; --list prints their names")
    if asked.list:
        print("\n".join(f"{name:45} {about(case)}".rstrip() for name, case in found.items()))
        parser.exit()
    return found


def run(
    cases: Mapping[str, C],
    begin: Callable[[Sequence[C]], Generator[tuple[str, R], None, None]],
    asked: argparse.Namespace,
    header: Mapping[str, str],
) -> Found[R]:
    """Run the cases that have no result yet, until time is up.

    Args:
        cases: all cases, by name.
        begin: yields the name and the result of each case that it takes; closed when time is up.
        asked: options that `add_options` added.
        header: the revision, the versions and the machine of this part.

    Raises:
        UsageError: the file holds results of another run.
    """
    started = time.monotonic()
    found: dict[str, R]
    found, before = read(asked.resume, header)
    due = [case for name, case in cases.items() if name not in found]
    with closing(begin(due)) as results:
        for name, result in results:
            found[name] = result
            taken = time.monotonic() - started
            if asked.resume is not None:
                append(asked.resume, header, (name, result, before + taken))
            if asked.minutes is not None and taken > 60 * asked.minutes:
                break
    here = {name: found[name] for name in cases if name in found}
    left = len(cases) - len(here)
    if left:
        how = "the same command runs them" if asked.resume else "--resume FILE keeps results for a later part"
        print(f"{left} of {len(cases)} cases are left; {how}", file=sys.stderr)
    return Found(here, left, before + time.monotonic() - started)


def in_processes(
    tasks: Iterable[T], work: Callable[[T], Iterable[tuple[str, R]]], jobs: int
) -> Generator[tuple[str, R], None, None]:
    """Yield the names and results that `work` yields of each task, as they come, from `jobs` processes.

    One job is this process. Where a process ends, all tasks without a result are left to a later part.
    """
    if jobs == 1:
        for task in tasks:
            yield from work(task)
        return
    # The processes are the parallelism: torch, imported later, reads the variable and takes one thread.
    spawn, one_thread = multiprocessing.get_context("spawn"), ("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, spawn, initializer=os.putenv, initargs=one_thread) as pool:
        pending = [pool.submit(_listed, work, task) for task in tasks]
        try:
            for done in as_completed(pending):
                yield from done.result()
        except BrokenProcessPool as error:
            print(f"{error} The tasks without a result are left.", file=sys.stderr)
        finally:
            pool.shutdown(cancel_futures=True)


def told(problem: Exception) -> str:
    """Return an exception in a line."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else 'no message'}"


def _listed(work: Callable[[T], Iterable[R]], task: T) -> list[R]:
    return list(work(task))


def read(file: Path | None, header: Mapping[str, str]) -> tuple[dict[str, R], float]:
    """Return the results in a file, and the seconds that they took.

    Raises:
        UsageError: the file has another header.
    """
    found: dict[str, R] = {}
    seconds = 0.0
    if file is None or not file.exists():
        return found, seconds
    with file.open("r+b") as stream:
        theirs = pickle.load(stream)
        if theirs != header:
            differ = "; ".join(
                f"{name} {theirs.get(name, 'none')} there, {header.get(name, 'none')} here"
                for name in {**theirs, **header}
                if theirs.get(name) != header.get(name)
            )
            raise UsageError(f"--resume {file} holds results of another run ({differ}); name a new file, or remove it")
        whole = stream.tell()
        # A part that was killed may have left half a result.
        with suppress(EOFError, pickle.UnpicklingError):
            while True:
                name, result, seconds = pickle.load(stream)
                found[name], whole = result, stream.tell()
        stream.truncate(whole)
    return found, seconds


def append(file: Path, header: Mapping[str, str], result: object) -> None:
    """Add a result, as `read` finds it, to a file that begins with the header."""
    is_new = not file.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        if is_new:
            pickle.dump(dict(header), stream)
        pickle.dump(result, stream)

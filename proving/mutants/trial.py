"""Running chosen tests in a copy of the tree, unmutated or mutated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .mutant import EditError, Mutant, Suite
from .tree import GenerateError, copied, edit, environment
from .witness import REPORT

# Seconds. The slowest choice of tests takes a tenth of it on an idle core; an edit may make a loop endless.
_PATIENCE = 300.0


class Verdict(Enum):
    """The verdict on a mutant; anything but CAUGHT is to be mended, in the tests or in the table."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    # The test that failed of it fails without it, too.
    UNFIT = "UNFIT"
    # The edit does not fit, or nothing can be imported, generated or run with it.
    BROKEN = "BROKEN"
    TIMED_OUT = "TIMED OUT"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant.

    Attributes:
        mutant: which.
        verdict: what.
        said: the test that caught it, or why none did.
        seconds: how long it took.
    """

    mutant: Mutant
    verdict: Verdict
    said: str
    seconds: float

    @property
    def caught(self) -> bool:
        """Return True if the mutant made a test fail."""
        return self.verdict is Verdict.CAUGHT


class _RunError(Exception):
    """A run of tests that ended without saying what it found, was ended, or was not of the copy."""

    def __init__(self, said: str, verdict: Verdict = Verdict.BROKEN) -> None:
        super().__init__(said)
        self.verdict = verdict


# What came of tests, "failed", "broken" or "passed", and their node ids.
_Run = dict[str, list[str]]


@dataclass(frozen=True)
class Runner:
    """Runs tests of both suites in copies of a tree, in a process each.

    Attributes:
        snapshot: the tree.
        files: the files that are copied, from its root.
    """

    snapshot: Path
    files: Sequence[str]

    def failing_unmutated(self, suite: Suite, tests: Sequence[str]) -> tuple[str, ...]:
        """Return those of the tests that caught mutants that fail in a copy without an edit."""
        with copied(self.snapshot, self.files) as tree:
            run = self._run(tree, suite, tests, stop=False, patience=10 * _PATIENCE)
        return (*run["failed"], *run["broken"])

    def outcome(self, mutant: Mutant) -> Outcome:
        """Try a mutant. That it is caught means little until the test that caught it has passed without it."""
        started = time.monotonic()
        try:
            with copied(self.snapshot, self.files) as tree:
                edit(tree, mutant)
                run = self._run(tree, mutant.suite, mutant.tests, stop=True, patience=_PATIENCE)
            verdict, said = Verdict.SURVIVED, f"{len(run['passed'])} tests passed"
            for name, other in (("failed", Verdict.CAUGHT), ("broken", Verdict.BROKEN)):
                if run[name]:
                    verdict, said = other, run[name][0]
        except _RunError as error:
            verdict, said = error.verdict, str(error)
        except (EditError, GenerateError) as error:
            verdict, said = Verdict.BROKEN, str(error)
        return Outcome(mutant, verdict, said, time.monotonic() - started)

    def _run(self, tree: Path, suite: Suite, tests: Sequence[str], *, stop: bool, patience: float) -> _Run:
        report, output = tree / "report.json", tree / "output.txt"
        options = ["-q", "-p", "proving.mutants.witness", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        options += ["-x"] if stop else []
        options += ["-m", "compile"] if suite is Suite.COMPILE else []
        variables = environment(tree) | {REPORT: str(report)}
        variables |= {"TRITON_INTERPRET": "1"} if suite is Suite.INTERPRETER else {}
        status = _pytest(tree, [*options, *tests], variables, output, patience)
        if status is None:
            raise _RunError(f"the tests took more than {patience:.0f} s", Verdict.TIMED_OUT)
        said = output.read_text(errors="replace").strip()[-2000:]
        if not report.is_file():
            raise _RunError(f"pytest ended with status {status}: {said}")
        found = json.loads(report.read_text())
        if status < 0 and (found["failed"] or found["running"]):
            # An edit that writes beyond memory may end the process, and with it the test that is to notice.
            return {"failed": [*found["failed"], found["running"]][:1], "broken": [], "passed": []}
        strange = [origin for origin in found["origins"] if not Path(origin).is_relative_to(tree)]
        if strange or not found["origins"]:
            raise _RunError(
                f"normforge was imported from {strange or 'nowhere'}, and not from the copy in {tree}: {said}"
            )
        if status not in (0, 1) and not found["broken"]:
            raise _RunError(f"pytest ended with status {status}: {said}")
        return {name: found[name] for name in ("failed", "broken", "passed")}


def _pytest(
    tree: Path, arguments: Sequence[str], variables: Mapping[str, str], output: Path, patience: float
) -> int | None:
    """Run pytest in a tree and return its exit status; None if it took too long."""
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=tree,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Processes that the tests started end with them.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

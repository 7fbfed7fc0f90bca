"""Run a long list of tests in parts: `--minutes=N` limits a part, `--resume=FILE` leaves out what passed before.

Pytest looks for its configuration beside what follows an option without `=`, so the equals sign is part of the form.

The file's first line names the sources, versions and device that its results hold for; each further line is a test that
passed. A part with other sources, versions or device is refused, so one file is the evidence for one revision.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

_SOURCES = ("codegen", "generated", "runtime", "templates", "tests", "proving", "tools", "benchmarks")
_SUFFIXES = {".c", ".golden", ".j2", ".py", ".yaml"}

# A run's workers inherit the deadline, a point of the monotonic clock that all processes of a host share.
_DEADLINE = "NORMFORGE_TESTS_DEADLINE"


def add_options(parser: pytest.Parser) -> None:
    """Declare the two options."""
    group = parser.getgroup("parts of a long run")
    group.addoption("--minutes", type=float, help="start no test after this time, and say how many are left")
    # A string: xdist can send no path to its workers.
    group.addoption("--resume", metavar="FILE", help="leave out the tests that FILE says passed; add to FILE")


def environment() -> dict[str, str]:
    """Return what a result holds for: the digest of the sources, the versions, and the device."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "sources": digest.hexdigest()[:16],
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Importing triton would settle whether it interprets, before the run chooses.
        "triton": version("triton"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def passed(file: Path, here: dict[str, str]) -> frozenset[str]:
    """Return the tests that a file says passed; a missing file has none.

    Raises:
        pytest.UsageError: the file holds for other sources, versions or another device.
    """
    if not file.exists():
        return frozenset()
    first, *lines = file.read_text().splitlines() or ["{}"]
    theirs = json.loads(first)
    if theirs != here:
        differ = ", ".join(
            f"{key} {theirs.get(key)} there, {here[key]} here" for key in here if theirs.get(key) != here[key]
        )
        raise pytest.UsageError(
            f"--resume={file} holds results of another run ({differ}); name a new file, or remove it"
        )
    return frozenset(lines)


class Parts:
    """The plugin of one process of a run."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the file; the process that controls a run also writes to it."""
        self._file = None if config.option.resume is None else Path(config.option.resume)
        self._controls = not hasattr(config, "workerinput")
        if self._controls and config.option.minutes is not None:
            os.environ[_DEADLINE] = str(time.monotonic() + 60 * config.option.minutes)
        self._deadline = float(os.environ.get(_DEADLINE, "inf")) if config.option.minutes is not None else float("inf")
        self._passed: frozenset[str] = frozenset()
        # Passed so far, of the phases of one test: a failed teardown is a failure too.
        self._is_passing: dict[str, bool] = {}
        if self._file is not None:
            here = environment()
            self._passed = passed(self._file, here)
            if self._controls and not self._file.exists():
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(json.dumps(here) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what passed before."""
        kept = [item for item in items if item.nodeid not in self._passed]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._passed])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Start no test after the deadline; a test that is not started has no report."""
        return True if self._is_over() else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test that passed, or was skipped for a reason of its own, to the file."""
        if not self._controls:
            return
        self._is_passing[report.nodeid] = self._is_passing.get(report.nodeid, True) and not report.failed
        if report.when == "teardown" and self._file is not None and self._is_passing[report.nodeid]:
            with self._file.open("a") as file:
                file.write(report.nodeid + "\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a part that ran out of time; pass one that found nothing left to run."""
        if self._is_over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self._passed and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests passed in earlier parts, and whether time ran out."""
        if self._passed:
            terminalreporter.write_line(f"{len(self._passed)} passed in earlier parts, by {self._file}")
        if self._is_over():
            terminalreporter.write_line("time is up: the same command with --resume=FILE runs the tests that are left")

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline

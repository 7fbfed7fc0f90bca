"""Run a long list of tests in parts: `--minutes=N` limits a part, `--resume=FILE` leaves out what passed before.

Pytest looks for its configuration beside what follows an option without `=`, so the equals sign is part of the form.

The file is one of `proving.parts`, of the tests that passed: it begins with the sources, versions and device that its
results hold for. A part with other sources, versions or device is refused: one file is the evidence for one revision.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.errors import UsageError
from proving import parts

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


class Parts:
    """The plugin of one process of a run."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the file; the process that controls a run also writes to it."""
        self._file = None if config.option.resume is None else Path(config.option.resume)
        self._controls = not hasattr(config, "workerinput")
        if self._controls and config.option.minutes is not None:
            os.environ[_DEADLINE] = str(time.monotonic() + 60 * config.option.minutes)
        self._deadline = float(os.environ.get(_DEADLINE, "inf")) if config.option.minutes is not None else float("inf")
        self._here = {} if self._file is None else environment()
        try:
            sent = getattr(config, "workerinput", {}).get("passed")
            self._passed = frozenset[str](parts.read(self._file, self._here)[0] if sent is None else sent)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
        # Passed so far, of the phases of one test: a failed teardown is a failure too.
        self._is_passing: dict[str, bool] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker what passed before the run began: one in place of another must collect the same tests."""
        node.workerinput["passed"] = sorted(self._passed)

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
            parts.append(self._file, self._here, (report.nodeid, None, 0.0))

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

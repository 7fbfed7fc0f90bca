"""A pytest plugin: what a run of tests in a copy of the tree found, written as JSON.

It is loaded with `-p` and must not import what decides, while being imported, how kernels run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

# Names the file that is written.
REPORT = "MUTANT_REPORT"

_found: dict[str, list[str]] = {"failed": [], "broken": [], "passed": []}


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which test runs, should it end the process."""
    _write(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that failed, or passed."""
    if report.failed and report.nodeid not in _found["failed"]:
        _found["failed"].append(report.nodeid)
    elif report.when == "call" and report.passed:
        _found["passed"].append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note what could not even be collected: an edit after which nothing can be imported is no test's merit."""
    if report.failed:
        _found["broken"].append(f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}")


def pytest_sessionfinish() -> None:
    """Write what was seen."""
    _write("")


def _write(running: str) -> None:
    """Write what was seen so far, and where every module of normforge came from."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "normforge"]
    origins = {str(Path(file).resolve()) for module in modules if (file := getattr(module, "__file__", None))}
    Path(os.environ[REPORT]).write_text(json.dumps(_found | {"origins": sorted(origins), "running": running}))

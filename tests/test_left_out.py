"""A run that lacks libraries of tests/clients says so in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .conftest import pytest_terminal_summary


def _summary(*reports: Any) -> list[str]:
    lines: list[str] = []
    terminal: Any = SimpleNamespace(stats={"skipped": reports}, write_line=lines.append)
    config: Any = SimpleNamespace(get_verbosity=lambda: 0)
    pytest_terminal_summary(terminal, config)
    return lines


def _skipped(name: str, reason: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=name, longrepr=(name, 1, f"Skipped: {reason}"))


def test_what_was_skipped_for_want_of_a_library_is_named_once() -> None:
    lacks = "an extra of its own: make test-clients installs it"
    # Each worker reports what it could not collect.
    reports = [_skipped("tests/clients/test_timm.py", lacks)] * 2 + [_skipped("tests/nn/test_modules.py", "no card")]
    assert _summary(*reports, _skipped("tests/clients/test_onnx.py", lacks)) == [
        "skipped, for want of the libraries that make test-clients installs: "
        "tests/clients/test_onnx.py, tests/clients/test_timm.py"
    ]
    assert _summary(reports[-1]) == []

"""A run in parts: each test that passed is left out of the next part, and no other is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .calling import command
from .thorough import LONG, THOROUGH

_PLUGIN = """
from tests import in_parts

def pytest_addoption(parser):
    in_parts.add_options(parser)

def pytest_configure(config):
    in_parts.ROOT = config.rootpath
    config.pluginmanager.register(in_parts.Parts(config))
"""
_TESTS = """
from pathlib import Path
import time
import pytest

@pytest.fixture
def torn():
    yield
    assert Path("mended").exists()

def test_slow():
    time.sleep(0.5)

def test_red():
    assert Path("mended").exists()

def test_torn(torn):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(_PLUGIN)
    (tmp_path / "test_some.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(folder: Path, repository: Path, *options: str) -> tuple[int, str]:
    # Python's path holds the repository alone, so that `tests` is this package.
    code = f"import sys, pytest; sys.path.insert(0, {str(repository)!r}); sys.exit(pytest.main(sys.argv[1:]))"
    done = command(sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *options, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@LONG
@THOROUGH
@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_parts_leave_out_what_passed_and_fail_while_tests_are_left(
    folder: Path, repository: Path, workers: tuple[str, ...]
) -> None:
    status, said = run(folder, repository, "--minutes", "0.005", "--resume", "part.txt", *workers)
    assert status == 1
    assert "time is up" in said
    status, said = run(folder, repository, "--minutes", "5", "--resume", "part.txt", *workers)
    assert status == 1
    assert "1 failed" in said
    assert "1 error" in said
    (folder / "mended").touch()
    status, said = run(folder, repository, "--resume", "part.txt", *workers)
    assert status == 0
    assert "2 passed" in said
    assert "1 passed in earlier parts, by part.txt" in said
    status, said = run(folder, repository, "--resume", "part.txt")
    assert status == 0
    assert "3 passed in earlier parts" in said


@THOROUGH
def test_a_worker_that_dies_is_replaced(folder: Path, repository: Path) -> None:
    """By one that collects the same tests, whatever has passed since the run began."""
    (folder / "test_then.py").write_text("import os\ndef test_dies():\n    os._exit(1)\ndef test_last():\n    pass\n")
    _, said = run(folder, repository, "--resume", "part.txt", "-n", "1")
    assert "2 failed, 3 passed, 1 error" in said

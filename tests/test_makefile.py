"""What `make` would do, as `make -n` prints it."""

from __future__ import annotations

import subprocess
from pathlib import Path


def planned(repository: Path, tmp_path: Path, target: str) -> str:
    """Return the commands of a target in a fresh clone, none of which is run."""
    command = ["make", "-n", target, f"VENV={tmp_path / 'none'}"]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_the_needs_of_the_runtime_alone(repository: Path, tmp_path: Path) -> None:
    text = planned(repository, tmp_path, "demo")
    assert "-e .\n" in text
    assert "[test" not in text
    # pip shows its progress, and what is downloaded is named before.
    assert "pip install -q -c constraints.txt --no-build-isolation" not in text
    assert text.index("PyTorch and Triton") < text.index("-e .\n") < text.index("normforge demo")


def test_tests_install_the_extras_and_say_what_they_do_first(repository: Path, tmp_path: Path) -> None:
    text = planned(repository, tmp_path, "test")
    assert text.index("-e '.[test,lint]'") < text.index("7 to 10 minutes") < text.index("collecting the tests first")


def test_smoke_is_interpreted(repository: Path, tmp_path: Path) -> None:
    text = planned(repository, tmp_path, "smoke")
    assert "TRITON_INTERPRET=1" in text
    assert "generate.py --check" in text
    assert all((repository / name).exists() for name in text.split() if name.startswith("tests/"))

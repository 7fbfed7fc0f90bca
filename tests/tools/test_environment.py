"""What a measurement says of where it was made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from normforge.tools.environment import NOT_KNOWN, describe, revision_of
from normforge.tools.machine import Machine


def git(at: Path, *command: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(["git", *who, *command], cwd=at, check=True, capture_output=True, text=True).stdout.strip()


def test_a_revision_says_whether_the_tree_was_changed_but_for_results(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "kernel").write_text("1")
    assert revision_of(tmp_path, "results") == NOT_KNOWN
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    short = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert revision_of(tmp_path, "results") == short
    (tmp_path / "results" / "sm_90.yaml").write_text("of this run")
    assert revision_of(tmp_path, "results") == short
    (tmp_path / "kernel").write_text("2")
    assert revision_of(tmp_path, "results") == f"{short}, with changes"
    # The revision of a checkout is not that of what is installed within it.
    assert revision_of(tmp_path / "results", "results") == NOT_KNOWN


def test_a_device_and_versions_are_named() -> None:
    said = describe(Machine(torch.device("cpu"), "a card", interpreted=False))
    assert (said["device"], said["driver"], said["torch"]) == ("a card", "none", torch.__version__)

"""Release: the version, the changelog, the distribution and the workflows agree with one another."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import normforge

HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2}|unreleased)$", re.MULTILINE)


def test_the_newest_heading_of_the_changelog_is_the_version_with_upgrade_notes(repository: Path) -> None:
    text = (repository / "CHANGELOG.md").read_text()
    (newest, date), (before, _) = HEADING.findall(text)[:2]
    assert newest == normforge.__version__
    assert date != "unreleased"
    assert f"### Upgrading from {before}\n" in text


def workflow(repository: Path, name: str) -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load((repository / ".github" / "workflows" / f"{name}.yml").read_text())
    return read


def commands(read: dict[Any, Any]) -> Iterator[str]:
    return (step["run"] for job in read["jobs"].values() for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("name", ["docs", "release", "tests"])
def test_a_workflow_runs_targets_that_exist(repository: Path, name: str) -> None:
    read = workflow(repository, name)
    (phony,) = re.findall(r"^\.PHONY: (help .*)$", (repository / "Makefile").read_text(), re.MULTILINE)
    targets = [target for command in commands(read) for target in re.findall(r"^make (.+)$", command)]
    assert targets
    assert set(targets) <= set(phony.split())
    # A job gets more than reading only where it says so.
    assert read["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in read["jobs"].values())


def test_workflows_run_what_every_change_must_pass(repository: Path) -> None:
    ran = {command for name in ("tests", "docs") for command in commands(workflow(repository, name))}
    every = re.findall(r"^make (.+)$", (repository / ".ci" / "run").read_text(), re.MULTILINE)
    # The rest of the tests takes longer than a runner may.
    assert {f"make {target}" for line in every for target in line.split()} - ran == {"make test-all"}


@pytest.mark.parametrize(("tag", "status"), [(f"v{normforge.__version__}", 0), ("v0.0.1", 1), ("nightly", 1)])
def test_only_the_tag_of_the_version_is_released(repository: Path, tag: str, status: int) -> None:
    (compare,) = (command for command in commands(workflow(repository, "release")) if "GITHUB_REF_NAME" in command)
    named = os.environ | {"GITHUB_REF_NAME": tag}
    assert subprocess.run(["bash", "-c", compare], cwd=repository, env=named, check=False).returncode == status

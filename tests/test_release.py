"""Release: the version, the changelog, the distribution and the workflows agree with one another."""

from __future__ import annotations

import re
from pathlib import Path

import normforge

from .test_makefile import planned

HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2}|unreleased)$", re.MULTILINE)


def test_the_newest_heading_of_the_changelog_is_the_version_with_upgrade_notes(repository: Path) -> None:
    text = (repository / "CHANGELOG.md").read_text()
    (newest, date), (before, _) = HEADING.findall(text)[:2]
    assert newest == normforge.__version__
    assert date != "unreleased"
    assert f"### Upgrading from {before}\n" in text


def test_a_release_is_built_checked_and_tried_away_from_the_clone(repository: Path, tmp_path: Path) -> None:
    text = planned(repository, tmp_path, "dist")
    steps = (
        "-e '.[dist]'",
        "-m build",
        "twine check --strict",
        "check-wheel-contents",
        "install -c constraints.txt dist/",
        "normforge demo",
    )
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert re.search(r"^cd \S+-dist && bin/normforge demo$", text, re.MULTILINE)

"""The results that are committed: a folder is of one revision and one machine, and its pictures are its tables'."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chosen import RESULTS
from proving.evidence import TABLES

ROOT = RESULTS.parent.parent
EVIDENCE = ROOT / TABLES
# A command of its own writes each table of evidence, at a revision of its own.
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir() and path != EVIDENCE)
# All results together. This number only falls: an older run goes when a newer one of its kind and card comes.
MOST_BYTES = 3_000_000
# What two tables of one run may differ in: what only some of them used, or were given.
OWN = {"shape", "beside", "seed", "rows", "jax", "transformers", "timm"}

each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


def headers(folder: Path) -> Iterator[dict[str, str]]:
    """Yield what the header of each table, or file of text, of a folder states."""
    for path in (*folder.glob("*.csv"), *folder.glob("*.txt")):
        head = r"^# (\S.*?): (.+)$" if path.suffix == ".csv" else r"^(\w[\w-]*): (.+)$"
        yield dict(re.findall(head, path.read_text(), re.MULTILINE))


@each_folder
def test_a_folder_is_of_one_revision_and_one_machine(folder: Path) -> None:
    found = list(headers(folder))
    for key in {key for header in found for key in header} - OWN:
        assert len({header[key] for header in found if key in header}) == 1, key
    assert {path.suffix for path in folder.iterdir()} <= {".csv", ".txt", ".png"}


def test_every_table_states_its_revision() -> None:
    assert [path for path in RESULTS.iterdir() if not path.is_dir()] == []
    revisions = [header.get("revision", "") for folder in (*FOLDERS, EVIDENCE) for header in headers(folder)]
    assert revisions
    assert [revision for revision in revisions if not re.fullmatch(r"[0-9a-f]{7,40}", revision)] == []


def test_the_results_fit_into_their_budget() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= MOST_BYTES


def test_every_picture_is_on_a_page() -> None:
    """Every other picture is a command away, `python -m benchmarks report --pictures`, and need not be kept."""
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    pictures = [path.relative_to(ROOT).as_posix() for path in RESULTS.rglob("*.png")]
    assert pictures
    assert [picture for picture in pictures if picture not in pages] == []

"""The results that are committed: a folder is of one revision, its files belong together, and none is of another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest

from benchmarks.chosen import RESULTS
from benchmarks.models.names import SUITE as MODELS
from benchmarks.pictures import OVERVIEW, heat_map, save
from benchmarks.results import load
from benchmarks.suites import SUITES
from proving.evidence import TABLES

from ..thorough import THOROUGH

ROOT = RESULTS.parent.parent
EVIDENCE = ROOT / TABLES
# A command of its own writes each table of evidence, at a revision of its own.
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir() and path != EVIDENCE)
# All results together. This number only falls: an older run goes when a newer one of its kind and card comes.
MOST_BYTES = 3_000_000
# What two tables of one run may differ in: what only some of them used, or were told.
_OWN = {"shape", "beside", "seed", "rows", "jax", "transformers", "timm"}


def headers(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Of every table of a folder, and of every file of text, its name and what its header states."""
    for path in sorted(folder.glob("*.csv")):
        lines = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
        yield path.name, dict(line.split(": ", 1) for line in lines)
    for path in sorted(folder.glob("*.txt")):
        yield path.name, dict(re.findall(r"^(\w[\w-]*): (.+)$", path.read_text(), re.MULTILINE))


def faults(folder: Path) -> list[str]:
    """What is wrong with a folder's files, in words."""
    found = list(headers(folder))
    wrong = [] if found else ["no table"]
    for key in sorted({key for _, header in found for key in header} - _OWN):
        # Distributions are stated by tables that had peers of them.
        values = {header[key] for _, header in found if key in header}
        if len(values) > 1:
            wrong.append(f"{key} is {' and '.join(sorted(values))}")
    wrong += [
        f"{name} states no revision of this project's"
        for name, header in found
        if not re.fullmatch(r"[0-9a-f]{7,40}", header.get("revision", ""))
    ]
    names = {path.name for path in folder.iterdir()}
    for name in sorted(names):
        stem, _, kind = name.rpartition(".")
        if kind == "png":
            wrong += [] if set(tables_of(stem)) <= names else [f"{name} is of no table that is there"]
        elif kind not in ("csv", "txt"):
            wrong.append(f"{name} is nothing that a command writes")
    return wrong


def tables_of(picture: str) -> list[str]:
    """The tables that a picture is drawn from, by the names that `draw_all` gives it."""
    if picture == OVERVIEW:
        return ["forward.csv", "backward.csv"]
    suite = picture.removesuffix("-ratios")
    return [f"{suite}.csv" if suite in (*SUITES, MODELS) else "no table"]


def test_every_folder_is_named_for_its_device() -> None:
    assert FOLDERS
    assert [path.name for path in RESULTS.iterdir() if not path.is_dir()] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_is_of_one_revision_and_one_machine_without_a_stale_file(folder: Path) -> None:
    assert faults(folder) == []


def test_the_results_fit_into_their_budget() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= MOST_BYTES


def test_every_picture_is_on_a_page() -> None:
    """Every other picture is a command away, `python -m benchmarks report --pictures`, and need not be kept."""
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    pictures = [path.relative_to(ROOT).as_posix() for path in RESULTS.rglob("*.png")]
    assert pictures
    assert [picture for picture in pictures if picture not in pages] == []


def test_every_table_of_evidence_states_its_revision() -> None:
    stated = {name: header.get("revision", "") for name, header in headers(EVIDENCE)}
    assert stated.keys() == {path.name for path in EVIDENCE.iterdir()}
    assert [name for name, revision in stated.items() if not re.fullmatch(r"[0-9a-f]{7,40}", revision)] == []


def test_faults_are_found(tmp_path: Path) -> None:
    def table(name: str, **header: str) -> None:
        stated = {"device": "a GPU", "revision": "abc1234"} | header
        (tmp_path / f"{name}.csv").write_text("".join(f"# {key}: {value}\n" for key, value in stated.items()) + "m\n")

    assert faults(tmp_path) == ["no table"]
    table("forward")
    table("host", shape="16×4096")
    (tmp_path / "forward-ratios.png").touch()
    assert faults(tmp_path) == []
    table("host", revision="abc1235")
    assert faults(tmp_path) == ["revision is abc1234 and abc1235"]
    table("host", device="another")
    assert faults(tmp_path) == ["device is a GPU and another"]
    for revision in ("not known", "abc1234, with changes"):
        table("host", revision=revision)
        assert "host.csv states no revision of this project's" in faults(tmp_path)
    table("host")
    for name, wrong in (
        ("decode.json", "is nothing that a command writes"),
        ("decode.png", "is of no table that is there"),
        ("overview.png", "is of no table that is there"),
        ("forward.csv.part", "is nothing that a command writes"),
        ("goals.txt", "states no revision of this project's"),
    ):
        (tmp_path / name).touch()
        assert f"{name} {wrong}" in faults(tmp_path)
        (tmp_path / name).unlink()


@THOROUGH
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_heat_maps_are_drawn_of_the_tables_beside_them(folder: Path, tmp_path: Path) -> None:
    """To the byte; lines over N have colours that follow from which peers there are, and are not held to that."""
    pinned = re.findall(r"^matplotlib==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pinned != [matplotlib.__version__]:
        pytest.skip(
            f"matplotlib {matplotlib.__version__} draws other bytes than {pinned}, which drew what is committed"
        )
    there = {path.name for path in folder.glob("*-ratios.png")}
    for name in sorted(there):
        found = load(folder, name.removesuffix("-ratios.png"))
        assert found is not None
        assert save(heat_map(found), tmp_path / name).read_bytes() == (folder / name).read_bytes(), name

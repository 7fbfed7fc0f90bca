"""What is short of the sweep's goals: sorted into classes, each with its profile, and nothing left out."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import cli
from benchmarks.cells import Cell, Norm, Task
from benchmarks.chosen import RESULTS
from benchmarks.errors import UsageError
from benchmarks.reach import Rule
from benchmarks.results import OK, Results, Row, make_row
from benchmarks.short import Kernel, Short, by_class, kernels_of, render, short_of
from benchmarks.short_classes import CLASSES, ShortClass

RULES = (
    Rule("many rows, copy", "sweep", copy=0.9, least_m=2049),
    Rule("best peer", "sweep", peer=1.0),
    Rule("of another suite", "forward", peer=9.0),
    Rule("a mean, which no cell misses", "sweep", mean_peer=9.0),
)
LONG = Cell(Task.FORWARD, Norm.RMS, 4096, 65536, "bf16")
SHORT = Cell(Task.FORWARD, Norm.LAYER, 256, 64, "bf16")
ODD = Cell(Task.BACKWARD, Norm.LAYER, 64, 1001, "bf16")
FINE = Cell(Task.ADD, Norm.RMS, 4096, 1024, "bf16")


def row(cell: Cell, provider: str, us: float) -> Row:
    return replace(make_row(cell, provider, OK), us=us, bytes=1000)


def swept() -> Results:
    found = Results("sweep", {})
    for cell, ours, peer in ((LONG, 2.0, 1.5), (SHORT, 2.0, 1.9), (ODD, 4.0, 3.0), (FINE, 1.0, 1.1)):
        for name, us in (("copy", 1.0), ("eager", peer), ("normforge", ours)):
            found.add(row(cell, name, us))
    return found


def test_a_cell_is_short_once_for_each_ratio_that_goals_ask_for() -> None:
    found = {(one.row.cell, one.of): one.ratio for one in short_of(swept(), RULES)}
    assert found == {
        (LONG.id, "of the copy's speed"): 0.5,
        (LONG.id, "of the best peer's"): 0.75,
        (SHORT.id, "of the best peer's"): 0.95,
        (ODD.id, "of the best peer's"): 0.75,
    }


def test_a_cell_is_of_the_first_class_that_covers_it() -> None:
    odd, long = ShortClass("odd", "why.", aligned=False), ShortClass("long", "why.", least_n=1024)
    rest = ShortClass("rest", "why.", tasks=("forward",), norm="ln", most_n=512, many=False)
    found = by_class(short_of(swept(), RULES), (odd, long, rest))
    assert {title: {one.row.cell for one in cells} for title, cells in found.items()} == {
        "odd": {ODD.id},
        "long": {LONG.id},
        "rest": {SHORT.id},
    }
    with pytest.raises(UsageError, match=r"forward/ln_bf16/256x64 is of no class of benchmarks/short_classes\.py"):
        by_class(short_of(swept(), RULES), (odd, long))


def test_every_cell_that_a_sweep_may_draw_is_of_a_class() -> None:
    rows = [
        row(Cell(task, norm, m, n, "bf16", "fp8"), "normforge", 1.0)
        for task in (Task.FORWARD, Task.ADD, Task.ADD_QUANT, Task.BACKWARD)
        for norm in Norm
        for m in (64, 2048, 2049, 1 << 22)
        for n in (32, 33, 512, 520, 1001, 1024, 8192, 8200, 131072)
    ]
    assert sum(len(cells) for cells in by_class(Short(one, "of the best peer's", 0.9) for one in rows).values()) == len(
        rows
    )
    assert len({one.title for one in CLASSES}) == len(CLASSES)


def test_a_class_says_how_short_its_cells_are_and_what_their_kernels_take() -> None:
    kernels = {LONG.id: Kernel(64, 0, 50), SHORT.id: Kernel(255, 152, 12), ODD.id: Kernel(96, 0, 25)}
    classes = (ShortClass("long", "Read twice.", least_n=4096), ShortClass("others", "Few."))
    long, others = render(short_of(swept(), RULES), kernels, classes).splitlines()
    assert long == (
        "- **long**: 1 cell, 1 at 0.50 of the copy's speed, 1 at 0.75 of the best peer's. 64 registers a thread, none "
        "spills, occupancy 50 %. Read twice."
    )
    assert others == (
        "- **others**: 2 cells, 2 at 0.75 to 0.95 of the best peer's. 96 to 255 registers a thread, 1 of 2 spill up to "
        "152 bytes, occupancy 12 to 25 %. Few."
    )
    del kernels[ODD.id]
    with pytest.raises(UsageError, match="backward/ln_bf16/64x1001 fell short and was not profiled"):
        render(short_of(swept(), RULES), kernels, classes)


def test_the_longest_kernel_of_a_call_counts(tmp_path: Path) -> None:
    (tmp_path / "profile.csv").write_text(
        "# revision: abc1234\nsuite,cell,provider,status,us,registers,spilled_bytes,occupancy_percent\n"
        "sweep,a,normforge,ok,3.0,40,0,50\nsweep,a,normforge,ok,9.0,64,8,25\nsweep,a,normforge,ok,1.0,99,,1\n"
        "sweep,b,compile,ok,9.0,64,8,25\nforward,c,normforge,ok,9.0,64,8,25\nsweep,d,normforge,fails: no,,,,\n"
    )
    assert kernels_of(tmp_path) == {"a": Kernel(64, 8, 25)}


def test_what_is_lacking_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"has no profile\.csv; make it: python -m benchmarks profile --suite sweep"):
        kernels_of(tmp_path)
    assert cli.main(["short", "--results", str(tmp_path)]) == cli.USAGE
    assert "no sweep is in" in capsys.readouterr().err


def test_a_list_is_saved_beside_its_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("sweep.csv", "profile.csv"):
        shutil.copy(RESULTS / "h200-sweep" / name, tmp_path)
    assert cli.main(["short", "--results", str(tmp_path), "--save"]) == 0
    assert (tmp_path / "short.txt").read_text() == (RESULTS / "h200-sweep" / "short.txt").read_text()
    assert f"saved: {tmp_path / 'short.txt'}" in capsys.readouterr().out

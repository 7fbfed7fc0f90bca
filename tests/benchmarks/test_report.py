"""Tables, goals and pictures of results that are made up."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cells import Cell, Norm, Task
from benchmarks.report import tables_of

from .small import results

LARGE, LONG = (Cell(Task.FORWARD, Norm.LAYER, 32768 * 4096 // n, n, group="256 MiB") for n in (4096, 8192))


def test_a_table_has_a_line_a_cell_and_names_failures(tmp_path: Path) -> None:
    times = {
        LARGE: {"copy": 100.0, "eager": 200.0, "quack": 110.0, "normforge": 104.0},
        LONG: {"copy": 100.0, "eager": 130.0, "quack": 0.0, "normforge": 125.0},
    }
    results("forward", *((cell, name, us) for cell, row in times.items() for name, us in row.items())).save(tmp_path)
    (((line, (grid,)),)) = tables_of(tmp_path).items()
    assert line == "Measured on a test, revision none."
    assert grid.title == "Forward: forward, ln_bf16"
    assert grid.heads == ("TB/s", "torch", "QuACK", "normforge", "copy of x")
    assert grid.lines == [
        ("32768×4096", "2.68", "4.88", "5.16", "5.37"),
        ("16384×8192", "4.13", "fails", "4.29", "5.37"),
    ]
    assert grid.notes == ["QuACK: `fails: RuntimeError: no such kernel`."]

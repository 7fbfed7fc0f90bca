"""The table of models: written and read, as text, as a picture, in a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models.names import BF16, COMPILE, EAGER, FAILS, Key
from benchmarks.models.picture import draw, picture
from benchmarks.models.table import Row, Table, load, tables_of

from ..small import records
from .toy import HEADER


def _table(*figures: tuple[str, str, str, float]) -> Table:
    """Rows of bf16 training steps: model, run, variant and milliseconds; none is a failure."""
    table = Table(dict(HEADER))
    for model, run, variant, ms in figures:
        key = Key(model, BF16, "train", run, variant)
        table.add(Row(*key, "ok", ms=ms, memory_gib=1.5) if ms else Row(*key, f"{FAILS}: no memory"))
    return table


def test_the_picture_is_drawn_from_the_table(tmp_path: Path) -> None:
    table = _table(
        ("llama", EAGER, "torch", 10.0),
        ("llama", EAGER, "patch", 8.0),
        ("llama", EAGER, "liger", 0),
        ("llama", COMPILE, "patch", 5.0),
        ("vit", COMPILE, "patch", 5.0),
    )
    figure = picture(table)
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == [
        "Training step, bf16, eager",
        "Training step, bf16, torch.compile",
    ]
    bars: list[list[Any]] = [list(axes.patches) for axes in figure.axes]
    heights = [[round(bar.get_height(), 3) for bar in each] for each in bars]
    # Nothing is said of a model whose eager step by torch is missing.
    assert heights == [[1.0, 1.25], [2.0]]
    table.save(tmp_path)
    assert draw(table, tmp_path) == tmp_path / "models.png"
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    assert picture(_table(("llama", EAGER, "patch", 8.0))) is None


def test_the_table_is_read_as_it_was_written_and_shown(tmp_path: Path) -> None:
    table = _table(("llama", EAGER, "torch", 10.0), ("llama", COMPILE, "patch", 8.126), ("vit", EAGER, "torch", 0))
    table.save(tmp_path)
    again = load(tmp_path, HEADER)
    assert again == table
    assert [record["variant"] for record in records(tmp_path, "models")[1]] == ["torch", "patch", "torch"]
    times = tables_of(table)[0]
    assert times.heads == ("ms", "torch", "patch + compile")
    assert times.lines[:2] == [("llama", "10.00", "8.13"), ("vit", "fails", "–")]


def test_the_last_line_is_the_mean_speed_beside_torch_run_likewise() -> None:
    table = _table(
        ("llama", EAGER, "torch", 10.0),
        ("llama", EAGER, "patch", 8.0),
        ("llama", COMPILE, "torch", 6.0),
        ("llama", COMPILE, "patch", 3.0),
        ("vit", EAGER, "torch", 10.0),
        ("vit", EAGER, "patch", 5.0),
        ("vit", COMPILE, "patch", 5.0),
    )
    times, memory = tables_of(table)
    assert times.heads == ("ms", "torch", "patch", "torch + compile", "patch + compile")
    # The square root of 1.25 times 2; compiled, only one model has both.
    assert times.lines[-1][1:] == ("1.000", "1.581", "1.000", "2.000")
    assert memory.title == "Training step, bf16: memory"
    assert len(memory.lines) == len(times.lines) - 1

"""Notes below tables: of what fails or is far below itself, with the version that did."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cells import Cell, Norm, Task
from benchmarks.report import render
from benchmarks.results import Results, Row

from .small import results

VERSIONS = {"quack-kernels": "0.6.5", "torch": "2.11.0", "triton": "3.6.0"}
CELLS = [Cell(Task.FORWARD, Norm.LAYER, 32768 * 4096 // n, n, group="256 MiB") for n in (4096, 8192, 16384)]


def _made(figures: Mapping[str, tuple[float, ...]], cells: list[Cell] = CELLS, suite: str = "forward") -> Results:
    made = results(
        suite, *((cell, name, us) for name, times in figures.items() for cell, us in zip(cells, times, strict=True))
    )
    made.header.update(VERSIONS)
    return made


def _notes(made: Results) -> list[str]:
    return [line for line in render([made]).splitlines() if line[:1] in ("¹", "²", "³")]


def _lines(made: Results) -> list[list[str]]:
    return [[word.strip() for word in line.split("|")[1:-1]] for line in render([made]).splitlines() if line[:1] == "|"]


def test_a_peer_far_below_itself_is_marked_with_its_version() -> None:
    # A third of the fastest's speed is 300 µs; what is always that slow is not below itself.
    slow = {"compile": (100.0, 100.0, 100.0), "eager": (900.0, 900.0, 900.0), "normforge": (1.0, 1.0, 900.0)}
    made = _made(slow | {"quack": (101.0, 120.0, 340.0)})
    (note,) = _notes(made)
    assert note.startswith("¹ QuACK (quack-kernels 0.6.5): under a third of the fastest peer's speed; ")
    assert note.endswith("why is not known.")
    quack = _lines(made)[0].index("QuACK")
    assert [line[quack] for line in _lines(made)[2:]] == ["5.32", "4.47", "1.58¹"]
    assert _notes(_made(slow | {"quack": (101.0, 120.0, 299.0)})) == []
    assert _notes(_made(slow | {"quack": (299.0, 299.0, 340.0)})) == []


def test_what_fails_is_marked_by_why_and_the_same_reason_is_given_once() -> None:
    made = _made({"normforge": (9.0, 9.0, 9.0), "quack": (0.0, 10.0, 0.0), "eager": (20.0, 20.0, 0.0)})
    assert _notes(made) == [
        "¹ QuACK (quack-kernels 0.6.5): `RuntimeError: no such kernel`.",
        "² torch 2.11.0: `RuntimeError: no such kernel`.",
    ]
    assert [line[1:3] for line in _lines(made)[2:]] == [["26.84", "fails¹"], ["26.84", "53.69"], ["fails²", "fails¹"]]


def test_how_wrong_an_output_is_makes_no_second_note() -> None:
    made = _made({"quack": (0.0, 0.0, 9.0)})
    for cell, times in ((CELLS[0], "0.07"), (CELLS[1], "1.2")):
        row = made.of(cell.id)["quack"]
        status = f"fails: WrongOutputError: y is wrong by {times} times its tolerance"
        made.add(Row(**{**row.__dict__, "status": status}))
    assert _notes(made) == ["¹ QuACK (quack-kernels 0.6.5): `WrongOutputError: y is wrong`."]


def test_a_reason_is_said_where_it_is_known() -> None:
    made = _made({"liger": (0.0, 9.0, 9.0)})
    made.header["liger-kernel"] = "0.8.5"
    status = "fails: RuntimeError: Cannot launch since n = 131072 exceeds the recommended Triton blocksize = 65536."
    made.add(Row(**{**made.of(CELLS[0].id)["liger"].__dict__, "status": status}))
    (note,) = _notes(made)
    assert note.endswith("blocksize = 65536`; a program of it holds a whole row.")


def test_below_a_table_without_figures_of_cells_failures_are_sentences() -> None:
    cells = [Cell(Task.FORWARD, Norm.LAYER, 64, n, group="M = 64") for n in (4099, 8193, 70000, 90000)]
    made = _made(
        {"normforge": (9.0,) * 4, "quack": (0.0, 0.0, 9.0, 9.0), "liger": (9.0, 9.0, 0.0, 0.0)}, cells, "sweep"
    )
    made.header.update({"liger-kernel": "0.8.5"})
    for cell in cells[2:]:
        status = f"fails: RuntimeError: n = {cell.n} exceeds the recommended Triton blocksize = 65536."
        made.add(Row(**{**made.of(cell.id)["liger"].__dict__, "status": status}))
    assert [line for line in render([made]).splitlines() if " fails in " in line] == [
        "QuACK (quack-kernels 0.6.5) fails in 2 cells, N from 4099 to 8193: `RuntimeError: no such kernel`.",
        "Liger (liger-kernel 0.8.5) fails in 2 cells, N from 70000 to 90000: `RuntimeError: n = 70000 exceeds the "
        "recommended Triton blocksize = 65536`; a program of it holds a whole row.",
    ]
    assert " fails in " not in render([_made({"quack": (9.0,) * 4}, cells, "sweep")])


def test_figures_of_two_tasks_are_not_held_against_each_other() -> None:
    """A recorded call is another thing than a plain one, and a peer may be good at one of the two."""
    cells = [Cell(task, Norm.LAYER, 16, 4096, group="ln") for task in (Task.FORWARD, Task.GRAD_FORWARD)]
    assert _notes(_made({"eager": (10.0, 10.0), "compile": (12.0, 80.0)}, cells, "host")) == []


def test_what_has_no_version_is_marked_only_where_it_fails() -> None:
    """The steps are this project's own, slow on purpose."""
    cells = [Cell(Task.FORWARD, Norm.LAYER, 131072, n, group="steps, forward") for n in (1024, 4096)]
    figures = {"step-forward-1": (10.0, 90.0), "step-forward-2": (10.0, 10.0)}
    assert _notes(_made(figures, cells, "steps")) == []
    (note,) = _notes(_made(figures | {"step-forward-1": (10.0, 0.0)}, cells, "steps"))
    assert note == "¹ 1 three sweeps: `RuntimeError: no such kernel`."

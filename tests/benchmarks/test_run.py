"""A run on the CPU, the command and what it refuses; how calls are timed and reported, and the profiler's answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import cli, parts, profile, run, startup
from benchmarks.cells import Cell, Method, Norm, Suite, Task
from benchmarks.device_trace import Kernel, Launch, TraceError, calls_in
from benchmarks.parts import NOTHING, WHOLE, Part, measure, nothing, summarised
from benchmarks.profile import kernel_rows
from benchmarks.report import tables_of
from benchmarks.results import Results, load, read
from benchmarks.runner import run_suite
from benchmarks.timing import flushes_ahead, summarise
from normforge.kernels import obtain as obtaining

from ..calling import status_of, there
from ..thorough import THOROUGH
from .small import CELLS, HEADER, SUITE, fails, loaded, plan, provider, results, torch_norm


@THOROUGH
def test_failures_are_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    providers = (
        provider("broken", fails),
        provider("greedy", Mock(side_effect=torch.OutOfMemoryError("tried to allocate 1000 GiB"))),
        provider("wrong", lambda inputs: torch_norm(inputs) + 1),
        provider("right", torch_norm),
    )
    assert run_suite(SUITE, CELLS, Results("forward", HEADER), plan(tmp_path, *providers)) == 0
    found = loaded(tmp_path)
    for cell in CELLS:
        rows = found.of(cell.id)
        assert rows["broken"].status == "fails: RuntimeError: no kernel for this shape"
        assert rows["greedy"].status == "fails: OutOfMemoryError: tried to allocate 1000 GiB"
        assert rows["wrong"].status.startswith("fails: WrongOutputError: y is wrong")
        assert rows["right"].ok
        assert rows["right"].us > 0


def test_results_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = Results("forward", {"device": "a test: with a colon", "revision": "none"})
    run_suite(SUITE, CELLS, results, plan(tmp_path, provider("copy", torch_norm), provider("broken", fails)))
    assert load(tmp_path, "forward") == results
    header, records = there(read(tmp_path, "forward", ["ratio_to_copy"]))
    assert header == results.header
    assert [record["ratio_to_copy"] for record in records] == ["", "1.0", "", "1.0"]
    assert load(tmp_path, "backward") is None


def test_spread() -> None:
    assert summarise([5.0]) == (5.0, 5.0, 5.0, 1)
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (3.5, 2.0, 5.0, 6)


def test_the_command_measures_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Suite("forward", "Forward", SUITE.method, tuple(dataclasses.replace(cell, m=9) for cell in CELLS))
    monkeypatch.setattr(run, "SUITES", {"forward": small})
    command = ["run", "--suite", "forward", "--rows", "2", "--providers", "eager", "copy", "normforge"]
    command += ["--out", str(tmp_path), "--revision", "r1"]
    assert cli.main([*command, "--only", "2x64"]) == 0
    assert cli.main(command) == 0
    found = loaded(tmp_path)
    assert len(found.rows) == 6
    assert all(row.ok and row.m == 2 for row in found.rows.values())
    assert found.header["revision"] == "r1"
    assert cli.main([*command[:-1], "r2"]) == cli.USAGE
    assert "(revision r1 there, r2 now); pass --fresh" in capsys.readouterr().err


def test_every_part_has_its_round_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def one_round(call: Callable[[], Any], calls: int) -> float:
        assert calls == 50
        order.append("nothing" if call is nothing else call())
        return float(len(order))

    monkeypatch.setattr(parts, "_round", one_round)
    a, b = Part(WHOLE, "a", lambda: "a"), Part(WHOLE, "b", lambda: "b")
    times = measure((a, b), 50, 0.0, 2)
    assert order == ["a", "b", "nothing"] * 4
    # Two passes count for nothing.
    assert times == {a: [7, 10], b: [8, 11], NOTHING: [9, 12]}


def test_a_call_of_nothing_is_taken_off_each() -> None:
    times = {Part(WHOLE, "one", nothing): [20.0, 30.0, 41.0], NOTHING: [0.5, 8.0, 0.5]}
    (row,) = summarised(times)
    # Of the median and the least by themselves, not of what lies between them in one pass.
    assert (row.group, row.part, row.us, row.us_min, row.passes) == (WHOLE, "one", 29.5, 19.5, 3)


REFUSED = [
    *((["beside", "a", "b", f"--within={w}"], f"{w!r} is no bound; give a") for w in ("-0.1", "nan", "3%", "inf")),
    *((["parts", "--seconds", s], f"{s!r} is no time; give seconds, such as 20") for s in ("soon", "-1", "inf")),
    (["list", "--suite", "forward", "--seed", "9"], "--seed 9 draws no cell of --suite forward; leave it out, or add"),
    (["both-ways", "--only", "sideways"], "--only sideways matches no cell; ids are such as fwd-whole-layer-add-"),
]


@pytest.mark.parametrize(
    ("argv", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_done_is_refused(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(cli.main, argv) == cli.USAGE
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@THOROUGH
def test_gradients_are_timed_both_ways(tmp_path: Path) -> None:
    """Of one cell: its table is written, and no other."""
    cell = "bwd-mxfp8-layer-add-128x128"
    assert cli.main(["both-ways", "--rows", "128", "--only", cell, "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["both-ways-bwd.csv"]
    (row,) = there(read(tmp_path, "both-ways-bwd", ["dx_alone", "dx_of_fp8_dy", "share"]))[1]
    assert float(row["ratio"]) == float(row["casts"]) / float(row["normforge"])


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


@THOROUGH
def test_what_is_compiled_ahead_is_what_the_process_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    startup.compile_ahead(tmp_path / "kernels", "sm_90")
    index = json.loads((tmp_path / "kernels" / "index.json").read_text())
    kernels = {row["key"].partition("(")[0].rpartition(":")[2] for row in index["kernels"]}
    assert {name.rpartition("_")[0] for name in kernels} >= {"ln_fwd_bf16_mv_one", "ln_bwd_bf16_one", "sum"}


@pytest.mark.parametrize("host_ms", [0.01, 0.1, 0.2, 0.4, 1.3])
def test_the_gpu_is_behind_the_host_when_a_call_comes(host_ms: float) -> None:
    flush_ms = 0.25
    flushes = flushes_ahead(host_ms, flush_ms)
    assert flushes * flush_ms > host_ms
    # And little of a run's time goes into it.
    assert (flushes - 1) * flush_ms < 2 * host_ms


MARK = "a call"
HOST, AUTOGRAD = 4242, 4243

MAIN = Kernel("ln_bwd_bf16_one_pass", (264, 1, 1), 512, 128, 4096, 50, 2.0)
FINALISE = Kernel("ln_bwd_bf16_finalise", (64, 1, 1), 128, 40, 0, 3, 64 / 132)
FLUSH = Kernel("void at::native::vectorized_elementwise_kernel<...>", (1048576, 1, 1), 128, 16, 0, 100, 7943.76)


def _event(cat: str, name: str, ts: float, dur: float, thread: int = HOST, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": thread, "ts": ts, "dur": dur, "args": args}


def _range(ts: float, dur: float) -> dict[str, Any]:
    return _event("user_annotation", MARK, ts, dur)


def _launch(
    kernel: Kernel, asked: float, ts: float, dur: float, correlation: int, thread: int = HOST
) -> list[dict[str, Any]]:
    """The events of a launch, as Kineto writes them: the driver's function, what ran, and the arrow between them."""
    about: dict[str, Any] = {
        "registers per thread": kernel.registers,
        "shared memory": kernel.shared_bytes,
        "blocks per SM": kernel.programs_per_sm,
        "grid": kernel.grid,
        "block": [kernel.threads, 1, 1],
        "est. achieved occupancy %": kernel.occupancy_percent,
    }
    arrow = {"id": correlation, "cat": "ac2g", "name": "ac2g", "pid": HOST, "tid": thread, "ts": asked}
    return [
        _event("cuda_driver", "cuLaunchKernelEx", asked, 3.0, thread, correlation=correlation),
        {"ph": "s", **arrow},
        _event("kernel", kernel.name, ts, dur, correlation=correlation, **about),
        {"ph": "f", **arrow, "ts": ts, "bp": "e"},
    ]


def _trace(*events: Any) -> dict[str, Any]:
    """A trace as it is exported, with what is not asked about."""
    flat = [event for each in events for event in (each if isinstance(each, list) else [each])]
    named = {"ph": "M", "name": "process_name", "ts": 0.0, "pid": HOST, "tid": 0, "args": {"name": "python"}}
    end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9000.0}
    span = _event("Trace", "PyTorch Profiler (0)", 0.0, 9000.0)
    # What a device did for a range: it begins late, and lacks what other threads launched.
    mirrored = _event("gpu_user_annotation", MARK, 700.0, 60.0)
    return {"schemaVersion": 1, "deviceProperties": [], "traceEvents": [named, *flat, span, mirrored, end]}


def test_a_call_has_what_it_launched_from_any_thread_and_nothing_else() -> None:
    trace = _trace(
        _launch(FLUSH, 90.0, 100.0, 250.0, 1),
        _range(400.0, 300.0),
        _launch(MAIN, 420.0, 425.0, 60.0, 2),
        # Asked for by autograd's thread, and begun after the range's end.
        _launch(FINALISE, 440.0, 705.0, 3.0, 3, AUTOGRAD),
        _launch(FLUSH, 800.0, 801.0, 250.0, 4),
    )
    assert calls_in(trace, MARK) == [[Launch(MAIN, 60.0), Launch(FINALISE, 3.0)]]


def test_a_call_that_ran_nothing_is_no_answer() -> None:
    trace = _trace(_range(400.0, 300.0), _launch(MAIN, 420.0, 425.0, 60.0, 2), _range(800.0, 300.0))
    with pytest.raises(TraceError, match=r"something run in 1 of 2 calls; .* another profiler may be attached"):
        calls_in(trace, MARK)


def test_rows_are_medians_and_their_sum_is_the_calls() -> None:
    cell = Cell(Task.BACKWARD, Norm.LAYER, 21840, 6144)
    fill = Kernel("fill", (1, 1, 1), 128, 8, 0, 0, 1 / 132)
    times = ((60.0, 1.0, 2.0, 3.0), (70.0, 1.5, 2.5, 9.0), (64.0, 4.0, 1.0, 3.5))
    calls = [
        [Launch(fill, one), Launch(MAIN, main), Launch(fill, two), Launch(FINALISE, finalise)]
        for main, one, two, finalise in times
    ]
    rows = kernel_rows("backward", cell, "normforge", calls)
    assert [(row.kernel, row.launches, row.us) for row in rows] == [
        # Of 1, 2, 1.5, 2.5, 4 and 1.
        ("fill", 2, 1.75),
        (MAIN.name, 1, 64.0),
        (FINALISE.name, 1, 3.5),
    ]
    # x and dy are read and dx is written. The calls took 66, 83 and 72.5.
    moved = 3 * 2 * 21840 * 6144
    assert {(row.bytes, row.call_us, row.gb_per_s) for row in rows} == {(moved, 72.5, round(moved / 72.5 / 1e3, 1))}
    (ceiling,) = kernel_rows("backward", cell, "copy", [[Launch(MAIN, 100.0)]])
    assert ceiling.bytes == 2 * 2 * 21840 * 6144


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_known", "nothing_compiled")
def test_a_card_shows_the_kernel_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(Task.FORWARD, Norm.LAYER, 8192, 4096)
    monkeypatch.setattr(profile, "SUITES", {"forward": Suite("forward", "Forward", Method.COLD, (cell,))})
    assert cli.main(["profile", "--suite", "forward", "--out", str(tmp_path)]) == 0
    (row,) = there(read(tmp_path, "profile", ["status"]))[1]
    ((key, _),) = obtaining.obtained()
    assert (row["status"], row["kernel"], row["launches"]) == ("ok", key.symbol, "1")
    assert int(row["threads"]) == 32 * dict(key.options)["num_warps"]
    assert float(row["us"]) == float(row["call_us"]) > 0
    assert int(row["registers"]) > 0
    assert row["spilled_bytes"] == "0"
    # What memory of a GPU can do, and a thousandth or a thousandfold of it cannot.
    assert 100 < float(row["gb_per_s"]) < 10_000

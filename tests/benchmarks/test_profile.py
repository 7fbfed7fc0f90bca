"""The profiler's answers: which kernels a call launched, what is made of their times, and the command."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cli, profile
from benchmarks.cells import Cell, Method, Norm, Suite, Task
from benchmarks.device_trace import Kernel, Launch, TraceError, calls_in
from benchmarks.profile import kernel_rows
from normforge.kernels import obtain as obtaining
from normforge.selection import dispatch

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
def test_a_card_shows_the_kernel_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "plans", {})
    monkeypatch.setattr(obtaining, "_compiled", {})
    cell = Cell(Task.FORWARD, Norm.LAYER, 8192, 4096)
    monkeypatch.setattr(profile, "SUITES", {"forward": Suite("forward", "Forward", Method.COLD, (cell,))})
    assert cli.main(["profile", "--suite", "forward", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "profile.csv").read_text().splitlines()
    (row,) = csv.DictReader(line for line in lines if not line.startswith("# "))
    ((key, _),) = obtaining.obtained()
    assert (row["status"], row["kernel"], row["launches"]) == ("ok", key.symbol, "1")
    assert int(row["threads"]) == 32 * dict(key.options)["num_warps"]
    assert float(row["us"]) == float(row["call_us"]) > 0
    assert int(row["registers"]) > 0
    assert row["spilled_bytes"] == "0"
    # What memory of a GPU can do, and a thousandth or a thousandfold of it cannot.
    assert 100 < float(row["gb_per_s"]) < 10_000

"""The command: its table, its page, and what several runs add up to; and processes that end in the middle."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pages import markers, section
from proving.conformance import pool, report
from proving.conformance.case import FP32, Case, Mode
from proving.conformance.command import main
from proving.conformance.outcome import Finding, Outcome
from proving.conformance.report import Report
from proving.conformance.table import cases, groups, share
from proving.evidence import EVIDENCE, load

from ..thorough import THOROUGH

MODE = Mode("LayerNorm", "forward", "fp16 → fp16", "-", "-")
HEADER = {"device": "a GPU", "seed": "0"}


def _outcome(units: float, own: float = 0.5, error: str = "") -> Outcome:
    findings = () if error else (Finding("y", units, own), Finding("mean", 0.1, 0.2))
    return Outcome("a-case", "ck_tile", MODE, findings, error)


def _report(part: int, *outcomes: Outcome) -> Report:
    found = Report(dict(HEADER), parts=[(part, 2)], seconds=1.0)
    for outcome in outcomes:
        found.count(outcome)
    return found


def test_a_line_counts_cases_and_keeps_the_largest_error() -> None:
    found = _report(1, _outcome(0.25), _outcome(0.75, own=1.5), _outcome(0.5))
    (line,) = found.lines.values()
    assert (line.passed, line.failed, line.units, line.output, line.own) == (2, 1, 0.75, "y", 1.5)
    assert found.failures == ["a-case: y 0.75 (own 1.5)"]


def test_what_raised_is_infinitely_wrong() -> None:
    found = _report(1, _outcome(0.0, error="ValueError: no"))
    (line,) = found.lines.values()
    assert (line.failed, line.units, line.output) == (1, math.inf, "error")
    assert found.failures == ["a-case: ValueError: no"]


def test_parts_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, outcome in enumerate((_outcome(0.25), _outcome(math.inf)), start=1):
        _report(part, outcome).write(tmp_path / f"{part}.json")
    page = tmp_path / EVIDENCE
    page.parent.mkdir(parents=True)
    page.write_text("\n".join(markers("conformance")))
    status = main(["--merge", str(tmp_path / "1.json"), str(tmp_path / "2.json"), "--record", str(tmp_path)])
    assert status == 1
    printed = capsys.readouterr().out
    assert "1 of 2 cases pass, in 2 s." in printed
    assert "a-case: y inf (own 0.5)" in printed
    table, text = load(tmp_path, "conformance"), section(page, "conformance")
    assert text == report.summary(table)
    assert "device a GPU, seed 0, seconds 2." in text
    assert "**1 of 2 cases pass.**" in text
    assert "- failed: 1 of ck_tile, LayerNorm, forward, fp16 → fp16, -, -" in text
    assert "| ck_tile | 1 | 1 | inf | 0.5 |" in text
    (row,) = table.rows
    assert (row["passed"], row["failed"], row["error"], row["output"]) == ("1", "1", "inf", "y")


@pytest.mark.parametrize(
    ("other", "why"),
    [(_report(1), "overlap"), (replace(_report(2), header={"device": "another", "seed": "0"}), "device of the parts")],
)
def test_what_is_no_other_part_of_the_run_is_not_added(other: Report, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        report.merge([_report(1), other])


def test_a_part_says_that_it_is_one() -> None:
    assert "of part 2/2" in _report(2, _outcome(0.5)).totals()


def test_parts_hold_every_case_once() -> None:
    listed = groups(cases())
    parts = [case for part in (1, 2, 3) for group in share(listed, part, 3) for case in group]
    assert sorted(case.id for case in parts) == sorted(case.id for case in cases())


@pytest.mark.parametrize(("text", "ok"), [("1/3", True), ("0/3", False), ("4/3", False), ("half", False)])
def test_slices(text: str, ok: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--slice", text, "--only", "no such case"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert ("leave no case" if ok else f"'{text}' is no part") in capsys.readouterr().err


def _short_cases() -> tuple[Case, ...]:
    few = [case for case in cases() if case.suite == "liger" and case.n == 41 and case.x is FP32]
    return tuple(replace(case, shape=(1, 2, case.n)) for case in few)


@THOROUGH
def test_processes_answer_for_every_case() -> None:
    chosen = _short_cases()
    outcomes = list(pool.run_in_processes(groups(chosen), torch.device("cpu"), 0, 2))
    assert sorted(outcome.case for outcome in outcomes) == sorted(case.id for case in chosen)
    assert [str(outcome) for outcome in outcomes if not outcome.ok] == []


@THOROUGH
def test_a_process_that_ends_takes_one_case_along(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _short_cases()
    monkeypatch.setattr(pool, "work", _ends_at_the_first)
    outcomes = list(pool.run_in_processes([(first, second)], torch.device("cpu"), 0, 1))
    assert [outcome.error for outcome in outcomes] == ["the process ended, with status 7"] * 2


def _ends_at_the_first(connection: object, device: torch.device, seed: int) -> None:
    os._exit(7)

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
from proving.conformance.table import cases, groups
from proving.evidence import EVIDENCE, load, record

from ..thorough import THOROUGH

MODE = Mode("LayerNorm", "forward", "fp16 → fp16", "-", "-")
HEADER = {"device": "a GPU", "seed": "0"}


def _outcome(units: float, own: float = 0.5, error: str = "") -> Outcome:
    findings = () if error else (Finding("y", units, own), Finding("mean", 0.1, 0.2))
    return Outcome("a-case", "ck_tile", MODE, findings, error)


def _report(*outcomes: Outcome) -> Report:
    return Report.of(HEADER, outcomes, 2.0)


def test_a_line_counts_cases_and_keeps_the_largest_error() -> None:
    found = _report(_outcome(0.25), _outcome(0.75, own=1.5), _outcome(0.5))
    (line,) = found.lines.values()
    assert (line.passed, line.failed, line.units, line.output, line.own) == (2, 1, 0.75, "y", 1.5)
    assert found.failures == ["a-case: y 0.75 (own 1.5)"]


def test_what_raised_is_infinitely_wrong() -> None:
    found = _report(_outcome(0.0, error="ValueError: no"))
    (line,) = found.lines.values()
    assert (line.failed, line.units, line.output) == (1, math.inf, "error")
    assert found.failures == ["a-case: ValueError: no"]


def test_the_page_is_a_summary_of_the_table(tmp_path: Path) -> None:
    page = tmp_path / EVIDENCE
    page.parent.mkdir(parents=True)
    page.write_text("\n".join(markers("conformance")))
    found = _report(_outcome(0.25), _outcome(math.inf))
    assert found.totals() == "1 of 2 cases pass, in 2 s."
    assert found.failures == ["a-case: y inf (own 0.5)"]
    record(tmp_path, "conformance", found.table(), report.summary)
    table, text = load(tmp_path, "conformance"), section(page, "conformance")
    assert text == report.summary(table)
    assert "device a GPU, seed 0, seconds 2." in text
    assert "**1 of 2 cases pass.**" in text
    assert "- failed: 1 of ck_tile, LayerNorm, forward, fp16 → fp16, -, -" in text
    assert "| ck_tile | 1 | 1 | inf | 0.5 |" in text
    (row,) = table.rows
    assert (row["passed"], row["failed"], row["error"], row["output"]) == ("1", "1", "inf", "y")


def test_words_that_name_no_case_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "no such case"])
    assert "leave no case" in capsys.readouterr().err


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

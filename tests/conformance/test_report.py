"""The command: its table, and the page; and the words that it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.pages import section
from proving.conformance import report
from proving.conformance.case import Mode
from proving.conformance.judge import Finding
from proving.conformance.run import Outcome
from proving.evidence import EVIDENCE, load, record

MODE = Mode("LayerNorm", "forward", "fp16 → fp16", "-", "-")
HEADER = {"device": "a GPU", "seed": "0"}


def _outcome(units: float, own: float = 0.5, error: str = "") -> Outcome:
    findings = () if error else (Finding("y", units, own), Finding("mean", 0.1, 0.2))
    return Outcome("a-case", "ck_tile", MODE, findings, error)


@pytest.mark.parametrize(
    ("outcomes", "row", "told"),
    [
        ([_outcome(0.2), _outcome(0.5, own=1.5), _outcome(0.4)], ("2", "1", "0.5", "y", "1.5", "y"), "y 0.5 (own 1.5)"),
        ([_outcome(0.0, error="ValueError: no")], ("0", "1", "inf", "error", "inf", "error"), "ValueError: no"),
        ([_outcome(0.25), _outcome(math.inf)], ("1", "1", "inf", "y", "0.5", "y"), "y inf (own 0.5)"),
    ],
    ids=["largest", "raised", "infinite"],
)  # fmt: skip
def test_a_row_counts_cases_and_keeps_the_largest_error(
    outcomes: list[Outcome], row: tuple[str, ...], told: str, checkout: Path
) -> None:
    assert [str(outcome) for outcome in outcomes if not outcome.ok] == [f"a-case: {told}"]
    record(checkout, "conformance", report.table(outcomes, HEADER), report.summary)
    table, text = load(checkout, "conformance"), section(checkout / EVIDENCE, "conformance")
    assert [*table.rows[0].values()] == ["ck_tile", "LayerNorm", "forward", "fp16 → fp16", "-", "-", *row]
    assert text == report.summary(table)
    assert "device a GPU, seed 0." in text
    assert f"**{row[0]} of {len(outcomes)} cases pass.**" in text
    assert "- failed: 1 of ck_tile, LayerNorm, forward, fp16 → fp16, -, -" in text
    assert f"| ck_tile | {row[0]} | 1 | {row[2]} | {row[4]} |" in text

"""What the runner makes of a compute-sanitizer's output, and that one is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from proving.sanitizer.cells import every
from proving.sanitizer.command import Outcome, main, summary, table
from proving.sanitizer.log import read

REPORTS: dict[str, tuple[str, int, int]] = yaml.safe_load(Path(__file__).with_name("reports.yaml").read_text())
OUT_OF_BOUNDS = REPORTS["bounds"][0]


def printed(reports: str, tail: str = "sanitizer done: 2\n", errors: int = 0) -> str:
    return (
        "========= COMPUTE-SANITIZER\nsanitizer cell: one\n"
        f"{reports}sanitizer cell: two\n{tail}========= ERROR SUMMARY: {errors} errors\n"
    )


@pytest.mark.parametrize(("reports", "ours", "others"), REPORTS.values(), ids=REPORTS)
def test_reports_of_our_kernels_count(reports: str, ours: int, others: int) -> None:
    log = read(printed("".join(reports)))
    assert len(log.errors) == ours
    assert len(log.reports) == ours + others
    assert log.cells == ["one", "two"]
    assert log.complete
    assert all(report.cell == "one" for report in log.reports)
    if reports == OUT_OF_BOUNDS:
        (report,) = log.errors
        assert report.what == "Invalid __global__ read of size 4 bytes"
        assert report.where == "at ln_fwd_bf16_window+0x5c0 in primitives.py:564"


def test_a_process_that_ends_early_or_a_call_that_fails_is_told() -> None:
    assert not read(printed("", tail="")).complete
    assert not read("sanitizer cell: one\nsanitizer done: 1\n").complete
    assert read(printed("sanitizer broken: CUDA error\n")).broken == ["one: CUDA error"]


NAMES = [cell.name for cell in every()]


def outcome(reports: str, cells: Sequence[str] = NAMES) -> Outcome:
    """What a tool came to whose process made calls, and then printed reports."""
    calls = "".join(f"sanitizer cell: {cell}\n" for cell in cells)
    tail = f"{reports}sanitizer done: 1\n========= ERROR SUMMARY: 0 errors\n"
    return Outcome("memcheck", (read(calls + tail),), 1.0)


def test_an_error_and_calls_that_were_not_made_are_not_clean() -> None:
    assert outcome("").clean
    assert not outcome(OUT_OF_BOUNDS).clean
    assert not outcome("", cells=()).clean
    assert "ln_fwd_bf16_window+0x5c0 in primitives.py:564" in outcome(OUT_OF_BOUNDS).found[0]


@pytest.mark.parametrize(("reports", "errors"), [("", 0), (OUT_OF_BOUNDS, 1)], ids=["clean", "bounds"])
def test_the_table_and_its_summary_count_what_a_tool_found(reports: str, errors: int) -> None:
    found = table([outcome(reports)], {"device": "a GPU"})
    text = summary(found)
    verdict = "not clean" if errors else "clean"
    assert f"| {len(NAMES)} | {errors} | 0 | 1 | {verdict} |" in text
    assert (f"- memcheck: `{NAMES[-1]}`, 1 errors" in text) == bool(errors)
    assert [row["call"] for row in found.rows] == NAMES
    assert sum(int(row["memcheck"]) for row in found.rows) == errors


def test_without_a_sanitizer_it_is_2_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import proving.sanitizer.command as runner

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runner, "_PLACES", ())
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "compute-sanitizer is neither on PATH" in told
    assert len(told.splitlines()) == 1

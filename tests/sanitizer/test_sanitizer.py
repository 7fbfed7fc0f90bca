"""What the runner makes of a compute-sanitizer's output, and that one is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from proving.sanitizer.cells import every
from proving.sanitizer.command import Outcome, main, summary, table
from proving.sanitizer.log import read

OUT_OF_BOUNDS = """\
========= Invalid __global__ read of size 4 bytes
=========     at ln_fwd_bf16_window+0x5c0 in primitives.py:564
=========     by thread (17,0,0) in block (2,0,0)
=========     Access at 0x7f5a3ba00258 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f5a3ba00000 of size 600 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in __triton_launcher.so
=========
"""
RACE = """\
========= Error: Race reported between Write access at rms_bwd_bf16_rows+0x620 in rms_bwd_bf16.py:60
=========     and Read access at rms_bwd_bf16_rows+0x7a0 in rms_bwd_bf16.py:61 [256 hazards]
=========
"""
UNINITIALISED = """\
========= Uninitialized __global__ memory read of size 16 bytes
=========     at {kernel}+0xc0
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f5a3ba00000
=========
"""
TORCHS = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>(int, T2)"
API = """\
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on CUDA API call to cuInit.
=========     Saved host backtrace up to driver entry point at error
=========
"""
DIED = "========= Error: process didn't terminate successfully\n=========     The application crashed.\n"


def printed(reports: str, tail: str = "sanitizer done: 2\n", errors: int = 0) -> str:
    return (
        "========= COMPUTE-SANITIZER\nsanitizer cell: one\n"
        f"{reports}sanitizer cell: two\n{tail}========= ERROR SUMMARY: {errors} errors\n"
    )


@pytest.mark.parametrize(
    ("reports", "ours", "others"),
    [
        ("", 0, 0),
        (OUT_OF_BOUNDS, 1, 0),
        (RACE, 1, 0),
        (UNINITIALISED.format(kernel="sum_partials"), 1, 0),
        (UNINITIALISED.format(kernel=TORCHS), 0, 1),
        (UNINITIALISED.format(kernel=TORCHS) + OUT_OF_BOUNDS + OUT_OF_BOUNDS, 2, 1),
        (API, 0, 0),
        (DIED, 1, 0),
        ("========= Something that no version said before\n", 1, 0),
    ],
    ids=["clean", "bounds", "race", "read", "torch's", "both", "api", "died", "unknown"],
)
def test_reports_of_our_kernels_count(reports: str, ours: int, others: int) -> None:
    log = read(printed(reports))
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

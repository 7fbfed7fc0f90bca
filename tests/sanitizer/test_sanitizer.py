"""The runner, on a compute-sanitizer that prints what the real one does, and on none."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.pages import section
from proving.evidence import EVIDENCE, load
from proving.sanitizer.cells import every
from proving.sanitizer.command import main, summary
from proving.sanitizer.log import read

from ..thorough import THOROUGH

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


def test_a_report_names_the_call_the_kernel_and_the_line() -> None:
    (report,) = read(printed(OUT_OF_BOUNDS)).errors
    assert report.cell == "one"
    assert report.what == "Invalid __global__ read of size 4 bytes"
    assert report.where == "at ln_fwd_bf16_window+0x5c0 in primitives.py:564"


def test_a_process_that_ends_early_or_a_call_that_fails_is_told() -> None:
    assert not read(printed("", tail="")).complete
    assert not read("sanitizer cell: one\nsanitizer done: 1\n").complete
    assert read(printed("sanitizer broken: CUDA error\n")).broken == ["one: CUDA error"]


FAKE = """\
#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA (R) Compute Sanitizer"; echo "Version 2025.3.1"; exit 0; fi
tool=$2
echo "========= COMPUTE-SANITIZER"
cat "$FAKE_FOLDER/calls"
if [ "$tool" = "$FAKE_FINDS" ]; then cat "$FAKE_FOLDER/report"; fi
echo "sanitizer done: 1"
echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.fixture
def fake(checkout: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Path:
    """A sanitizer on PATH that watches nothing, and a python whose calls are only named."""
    import proving.sanitizer.command as runner

    sanitizer = checkout / "compute-sanitizer"
    sanitizer.write_text(FAKE)
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{checkout}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_FOLDER", str(checkout))
    (checkout / "report").write_text(OUT_OF_BOUNDS)
    (checkout / "calls").write_text("".join(f"sanitizer cell: {cell.name}\n" for cell in every()))
    # Without a tool the calls are made for Triton's cache alone, and take minutes in the interpreter.
    stand_in = (str(sanitizer), "--tool", "none", "-m", "proving.sanitizer.worker")
    monkeypatch.setattr(runner, "_WORKER", stand_in)
    monkeypatch.chdir(repository)
    return checkout


@THOROUGH
@pytest.mark.parametrize("finds", ["memcheck", "nothing"])
def test_the_document_and_the_output_tell_what_a_tool_found(
    finds: str, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FINDS", finds)
    errors = int(finds == "memcheck")
    options = ["--device", "cpu", "--jobs", "1", "--tool", "memcheck", "--tool", "racecheck", "--revision", "abc"]
    assert main([*options, "--record", str(fake), "--log", str(fake / "log")]) == errors
    told, table, written = capsys.readouterr().out, load(fake, "sanitizer"), section(fake / EVIDENCE, "sanitizer")
    assert written == summary(table)
    assert "revision abc, compute-sanitizer 2025.3.1" in written
    for tool, found in (("memcheck", errors), ("racecheck", 0)):
        line = rf"^\| {tool} \|.*\| {len(every())} \| {found} \| 0 \| \d+ \| {'not clean' if found else 'clean'} \|$"
        assert re.search(line, written, re.MULTILINE)
        assert (f"- {tool}: `{every()[-1].name}`, 1 errors" in written) == bool(found)
        assert (f"{tool}: {every()[-1].name}" in told) == bool(found)
    assert ("ln_fwd_bf16_window+0x5c0 in primitives.py:564" in told) == bool(errors)
    assert [row["call"] for row in table.rows] == [cell.name for cell in every()]
    assert sum(int(row["memcheck"]) for row in table.rows) == errors
    assert {path.name for path in (fake / "log").iterdir()} == {"plain_1.log", "memcheck_1.log", "racecheck_1.log"}


@THOROUGH
def test_calls_that_were_not_made_are_an_error(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "calls").write_text("")
    assert main(["--device", "cpu", "--jobs", "1", "--tool", "memcheck"]) == 1
    assert "not clean" in capsys.readouterr().out


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

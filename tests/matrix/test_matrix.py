"""The matrix names every release it should, its slice is the same each time, and its table says what pytest said."""

from __future__ import annotations

import sys
from pathlib import Path

from proving.matrix.command import ALL, FEW, PYTHONS, TRITONS, counted, summary, table

from ..calling import command


def test_each_release_is_in_some_cell() -> None:
    assert set(FEW) <= set(ALL)
    for cells in (ALL, FEW):
        assert {cell.python for cell in cells} == set(PYTHONS)
        assert {cell.triton for cell in cells} == set(TRITONS)


def test_the_pinned_triton_is_among_them(repository: Path) -> None:
    pinned = (repository / "constraints.txt").read_text().splitlines()
    assert any(f"triton=={triton}" in pinned for triton in TRITONS)


FILES = {"test_a.py": 7, "test_b.py": 1, "test_c.py": 4}


def test_every_third_test_of_each_file(tmp_path: Path, repository: Path) -> None:
    for name, count in FILES.items():
        failing = "assert number" if name == "test_c.py" else "pass"
        (tmp_path / name).write_text(
            f"import pytest\n@pytest.mark.parametrize('number', range({count}))\ndef test_it(number): {failing}\n"
        )
    report = tmp_path / "report.xml"
    options = ["-p", "proving.matrix.every", "--every=3", f"--junitxml={report}", "-p", "no:cacheprovider"]
    files = (tmp_path / name for name in FILES)
    ended = command(sys.executable, "-m", "pytest", "-v", *options, *files, cwd=repository)
    ran = [f"{name}::test_it[{number}]" for name, count in FILES.items() for number in range(0, count, 3)]
    lines = [line.split(" ")[0] for line in ended.stdout.splitlines() if "%]" in line]
    assert [line.rpartition("/")[2] for line in lines] == ran
    assert counted(report) == (5, 1, 0)


def test_the_table_has_a_line_for_each_run() -> None:
    seen = ("3.13.1", "2.13.0", "3.9.0", "2.2.6", "compile", "12", "1", "2", "30")
    page = summary(table([[seen], "3.10x3.6.0: no"], {"revision": "abc"}))
    assert page.endswith("| 3.13.1 | 2.13.0 | 3.9.0 | 2.2.6 | compile | 12 | 1 | 2 | 30 |")
    assert "revision: abc; not run, 1: 3.10x3.6.0: no." in page

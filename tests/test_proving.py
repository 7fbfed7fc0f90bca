"""The command `python -m proving`, and long runs in parts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from benchmarks.errors import UsageError
from proving import parts
from proving.__main__ import WHAT, main
from proving.engines.command import difference

from .thorough import THOROUGH

HEADER = {"device": "a GPU", "revision": "abc"}
CASES = {name: index for index, name in enumerate("abcd")}


def run(file: Path, begun: list[int], *options: str, header: dict[str, str] = HEADER) -> parts.Found[int]:
    parser = argparse.ArgumentParser()
    parts.add_options(parser, jobs=1)

    def squares(due: Sequence[int]) -> Generator[tuple[str, int], None, None]:
        for case in due:
            begun.append(case)
            yield "abcd"[case], case * case

    return parts.run(CASES, squares, parser.parse_args(["--resume", str(file), *options]), header)


def test_cases_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parts.add_options(parser, jobs=1)
    assert parts.chosen(CASES, parser, parser.parse_args(["--only", "b*, [cd]"])) == {"b": 1, "c": 2, "d": 3}
    for wrong, said in (("--only=e", "--only 'e' matches no case"), ("--jobs=0", "'0' is not a number of at least 1")):
        with pytest.raises(SystemExit):
            parts.chosen(CASES, parser, parser.parse_args([wrong]))
        assert said in capsys.readouterr().err


def test_parts_leave_out_what_earlier_ones_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[int] = []
    first = run(tmp_path / "results", begun, "--minutes", "0")
    assert (first.results, first.left) == ({"a": 0}, 3)
    assert "3 of 4 cases are left; the same command runs them" in capsys.readouterr().err
    second = run(tmp_path / "results", begun)
    assert (second.results, second.left) == ({"a": 0, "b": 1, "c": 4, "d": 9}, 0)
    assert begun == [0, 1, 2, 3]


def squares_until_3(number: int) -> Generator[tuple[str, int], None, None]:
    if number == 3:
        os._exit(7)
    yield str(number), number * number


@THOROUGH
def test_a_process_that_ends_leaves_cases_and_keeps_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert dict(parts.in_processes(range(3), squares_until_3, 2)) == {"0": 0, "1": 1, "2": 4}
    assert "3" not in dict(parts.in_processes(range(4), squares_until_3, 2))
    assert "The tasks without a result are left." in capsys.readouterr().err


def test_half_a_result_of_a_part_that_was_killed_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "results"
    begun: list[int] = []
    run(file, begun)
    file.write_bytes(file.read_bytes()[:-3])
    for _ in range(2):
        assert run(file, begun).results == {"a": 0, "b": 1, "c": 4, "d": 9}
    assert begun == [0, 1, 2, 3, 3]


def test_results_of_another_run_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "results", [])
    with pytest.raises(UsageError, match=r"holds results of another run \(revision abc there, xyz here\)"):
        run(tmp_path / "results", [], header=HEADER | {"revision": "xyz"})


def test_every_proof_is_listed(repository: Path) -> None:
    assert WHAT.keys() == {path.parent.name for path in (repository / "proving").glob("*/command.py")}


@pytest.mark.parametrize("what", WHAT)
def test_a_proof_lists_its_options(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([what, "-h"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m proving {what} ")


def test_tokens_of_engines_differ_where_two_words_are_near() -> None:
    one = ([5, 6, 7], [{5: -1.0, 4: -2.0}, {6: -1.0, 9: -1.25}, {7: -0.5, 8: -3.0}])
    other = ([5, 9, 8], [{5: -1.0, 4: -2.0}, {9: -1.0, 6: -1.125}, {8: -0.5, 7: -3.0}])
    assert difference([one, one], [one, one]) == {"equal": "2 of 2", "margin": "0.0000"}
    assert difference([one, one], [one, other]) == {"equal": "1 of 2", "margin": "0.2500"}
    # A word that is not among the likeliest two of the other engine is no near one.
    assert difference([one], [([5, 3, 7], other[1])]) == {"equal": "0 of 1", "margin": "inf"}

"""What comes of a mutant: caught by a test, or not, or no mutant at all. Each runs tests in a copy of the tree."""

from __future__ import annotations

import pytest

from proving.mutants.mutant import Mutant, Suite
from proving.mutants.report import summary, table
from proving.mutants.tree import ROOT, present_files
from proving.mutants.trial import Runner, Verdict

from ..thorough import THOROUGH

# Needs no kernel.
_TEST = "tests/kernels/test_pipelines.py::test_alignment"
_OTHER = "tests/kernels/test_obtain.py::test_a_key_reads_as_a_call"
_RIGHT = "return bits & -bits"


def mutant(new: str, *tests: str, file: str = "runtime/kernels/strides.py", old: str = _RIGHT) -> Mutant:
    return Mutant("a-mutant", "row alignment", file, old, new, tests)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(ROOT, present_files())


@THOROUGH
def test_a_mutant_is_caught_by_the_test_that_fails(runner: Runner) -> None:
    found = runner.outcome(mutant("return bits", _TEST))
    assert (found.verdict, found.said) == (Verdict.CAUGHT, f"{_TEST}[strides0-16]")
    written = table([found], {"revision": "abc"}, 1.0)
    (row,) = written.rows
    assert [*row.values()][:4] == ["runtime/kernels/strides.py", "row alignment", "caught", f"{_TEST}[strides0-16]"]
    assert "revision abc" in summary(written)
    assert "**1 of 1 are caught.**" in summary(written)


@THOROUGH
def test_a_mutant_that_no_chosen_test_minds_survives(runner: Runner) -> None:
    found = runner.outcome(mutant("return bits", _OTHER))
    assert (found.verdict, found.said) == (Verdict.SURVIVED, "1 tests passed")
    text = summary(table([found], {"revision": "abc"}, 1.0))
    assert "**0 of 1 are caught.**" in text
    assert "- SURVIVED: `runtime/kernels/strides.py`, row alignment: 1 tests passed" in text


@THOROUGH
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (mutant("return (", _TEST), "SyntaxError"),
        (mutant("return bits", _TEST, old="nowhere"), "it takes one place"),
        (mutant("return bits", "tests/kernels/test_pipelines.py::test_nothing"), "not found"),
        (mutant("{% if %}", _TEST, file="templates/rows.py.j2", old="{% filter body %}"), "Expected an expression"),
    ],
    ids=["syntax", "edit", "test", "template"],
)
def test_what_cannot_be_run_is_nobodys_merit(broken: Mutant, said: str, runner: Runner) -> None:
    found = runner.outcome(broken)
    assert found.verdict is Verdict.BROKEN
    assert said in found.said


@THOROUGH
def test_tests_are_run_without_an_edit(runner: Runner) -> None:
    assert runner.failing_unmutated(Suite.INTERPRETER, (_TEST, _OTHER)) == ()

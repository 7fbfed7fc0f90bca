"""The table of mutants fits the tree: each edit has its place, and all that decides numbers has some; trials of one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from proving.mutants.mutant import EditError, Mutant, Suite
from proving.mutants.report import summary, table
from proving.mutants.table import MUTANTS
from proving.mutants.tree import ROOT, present_files
from proving.mutants.trial import Runner, Verdict

from ..thorough import THOROUGH

# Packages that hand calls on to others, or hold what results are compared with.
_WITHOUT_MUTANTS = {"integrations", "override", "reference"}
# Docstrings, types, signatures and look-ups alone.
_TEMPLATES_WITHOUT_CODE = {
    "templates/package.py.j2",
    "templates/operands.py.j2",
    "templates/functional.py.j2",
    "templates/jax_functions.py.j2",
    "templates/modules.py.j2",
}

# They hold text against a copy of it, or build a distribution: any edit would be noticed, whatever it breaks.
_NOT_CHOSEN = ("tests/golden/", "tests/mutants/", "tests/test_wheel.py")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_edit_fits(mutant: Mutant, repository: Path) -> None:
    text = (repository / mutant.file).read_text()
    assert mutant.applied(text) != text


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_chosen_test_is_there(mutant: Mutant, repository: Path) -> None:
    assert mutant.tests
    for test in mutant.tests:
        assert not test.startswith(_NOT_CHOSEN)
        file, _, function = test.partition("::")
        text = (repository / file).read_text()
        assert not function or f"def {function.partition('[')[0]}(" in text, test


def test_no_two_are_alike() -> None:
    names = Counter(mutant.name for mutant in MUTANTS)
    edits = Counter((mutant.file, mutant.old, mutant.new, mutant.which) for mutant in MUTANTS)
    assert [name for name, times in names.items() if times > 1] == []
    assert [edit for edit, times in edits.items() if times > 1] == []


def test_every_template_is_broken_somewhere(repository: Path) -> None:
    templates = {f"templates/{path.name}" for path in (repository / "templates").glob("*.j2")}
    assert templates - {mutant.file for mutant in MUTANTS} == _TEMPLATES_WITHOUT_CODE


def test_every_package_that_decides_numbers_is_broken_somewhere(repository: Path) -> None:
    packages = {path.parent.name for path in (repository / "runtime").glob("*/__init__.py")}
    assert packages - {Path(mutant.file).parts[1] for mutant in MUTANTS} == _WITHOUT_MUTANTS


def test_an_edit_has_one_place() -> None:
    def edited(text: str, old: str, which: int | None = None) -> str:
        return Mutant("m", "it", "file", old, "X", ("test",), which=which).applied(text)

    assert edited("a b a", "b") == "a X a"
    assert edited("a b a", "a", 1) == "a b X"
    for old, which in (("a", None), ("c", None), ("a", 2)):
        with pytest.raises(EditError, match="it takes one place"):
            edited("a b a", old, which)
    with pytest.raises(EditError, match="another text"):
        edited("X", "X")


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

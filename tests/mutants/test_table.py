"""The table of mutants fits the tree: every edit still has its place, and everything that decides numbers has some."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from proving.mutants.mutant import EditError, Mutant
from proving.mutants.table import MUTANTS

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

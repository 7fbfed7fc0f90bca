"""Every code block of the README and of docs/ is run: Python as it stands, shell by a shell, YAML as a manifest."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import normforge
from normforge.codegen import manifest
from normforge.codegen.tile_tables import read_table

from ..thorough import first_of_each
from .shell import PAGES, ROOT, Block, Shell, blocks, make_shell

# A shape, a formula or a picture, which nothing can run.
NOT_RUN = ("text", "math")

_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Text that differs between machines: times, and errors that another order of sums tips.
_VARYING = re.compile(r"\d[\d.]*(?= ms\b)|(?<=max error )[\d.e-]+")

_FRAGMENT = "# at the end of instances.yaml\n"


@dataclass
class Page:
    """The state that the blocks of one page share: Python's names, and a folder."""

    shell: Shell
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})


def _run_python(block: Block, page: Page) -> None:
    # Line numbers are the page's.
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
    exec(code, page.names)


def _run_session(block: Block, page: Page) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, page.names, str(block), str(block.page), block.line - 1)
    # A copy is what doctest clears.
    test.globs = page.names
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=_OPTIONS).run(test, out=said.append, clear_globs=False)
    assert not failed, "".join(said)


def _run_console(block: Block, page: Page) -> None:
    assert block.text.startswith("$ "), f"{block}: a command starts with '$ '"
    for part in block.text.split("$ ")[1:]:
        command, _, wanted = part.partition("\n")
        printed = page.shell.run(command)
        if wanted.strip():
            said = f"{command}\n--- the page says\n{wanted}--- it prints\n{printed}"
            assert doctest.OutputChecker().check_output(_same(wanted), _same(printed), _OPTIONS), said


def _same(text: str) -> str:
    return _VARYING.sub("#", text)


def _run_yaml(block: Block, page: Page) -> None:
    if block.text.startswith(_FRAGMENT):
        path, group = page.shell.folder / "instances.yaml", block.text.removeprefix(_FRAGMENT)
        before = path.read_text()
        head = re.escape(group.partition("\n")[0])
        without = re.sub(rf"^{head}\n(?: {{4,}}.*\n)*", "", before, flags=re.MULTILINE)
        if without != before:
            # A user has added a group of this name, as the page says.
            path.write_text(without)
            page.shell.run("python generate.py")
        with path.open("a") as file:
            file.write(group)
        manifest.load(path)
        return
    name = re.match(r"# (\S+\.yaml)", block.text)
    assert name, f"{block}: the first line names the file"
    path = page.shell.folder / name[1]
    path.write_text(block.text)
    (manifest.load if "\ngroups:" in block.text else read_table)(path)


RUN: dict[str, Callable[[Block, Page], object]] = {
    "python": _run_python,
    "pycon": _run_session,
    "sh": lambda block, page: page.shell.run(block.text),
    "console": _run_console,
    "yaml": _run_yaml,
}

WITH_BLOCKS = [page for page in PAGES if blocks(page)]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    shell = make_shell(tmp_path)
    monkeypatch.chdir(shell.folder)
    yield Page(shell)
    normforge.load_instances()


# The front door first, and docs/ with time.
FRONT_DOOR = first_of_each(
    WITH_BLOCKS, lambda path: path if path.parent == ROOT else None, lambda path: str(path.relative_to(ROOT))
)


@pytest.mark.parametrize("path", FRONT_DOOR)
def test_code_does_what_the_page_says(path: Path, page: Page) -> None:
    if path.name == "jax.md":
        # Skips the page where there is no JAX; elsewhere other tests of this process count on its settings.
        from ..jax import settled

        settled.settle(on_gpu=False)
    for block in blocks(path):
        if block.language in NOT_RUN:
            continue
        assert block.language in RUN, (
            f"{block}: no way to run it; {', '.join(RUN)} can be, {', '.join(NOT_RUN)} need not"
        )
        try:
            RUN[block.language](block, page)
        except Exception as error:
            raise AssertionError(f"{block}: {error}") from error

"""Code blocks and links of Markdown; the shell itself reads shell blocks, and stand-ins for programs note their calls.

What is cheap is run: the generator, `normforge list` and the like, in a copy of the folders that they read. What needs
a GPU, a network, a compiler or minutes is checked by the real argument parser, which ends the program once it has
read the arguments.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest import mock

from normforge.tools import cli

from ..calling import command, there

# Files that the generator reads and writes in a checkout, and files that make a folder one.
_COPIED = ("codegen", "templates", "generated", "manifests", "instances.yaml", "generate.py", "Makefile")

# Verbs of `normforge` that take seconds and no GPU.
_RUN_VERBS = ("backendbench", "generate", "hub", "list", "merge", "run", "--version")

# A user's own program in the examples.
PROGRAM = "serve.py"
# Files of a user beside a checkout: that program, and a list of cells per GPU.
_BESIDE = {
    PROGRAM: "import torch, normforge\n\nnormforge.rmsnorm2d_fwd(torch.randn(2, 64).bfloat16())\n",
    **{f"goals.{share}": "ln_bf16/32768x4096\n" for share in range(1, 5)},
}

_STAND_IN = f"""\
#!{sys.executable}
import json, os, sys, time
program, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
interpreted = dict(os.environ, TRITON_INTERPRET="1")
if program == "normforge" and arguments and arguments[0] in {_RUN_VERBS!r}:
    os.execve({sys.executable!r}, [{sys.executable!r}, "-m", "normforge", *arguments], interpreted)
# What was compiled ahead of time is for a GPU.
if program == "python" and arguments[:1] in (["generate.py"], [{PROGRAM!r}]) and "NORMFORGE_AOT" not in os.environ:
    os.execve({sys.executable!r}, [{sys.executable!r}, *arguments], interpreted)
if program == "git" and arguments[:1] == ["rev-parse"]:
    print("0123abc")
name = os.path.join({{calls!r}}, f"{{{{time.time_ns()}}}}-{{{{os.getpid()}}}}.json")
with open(name, "w") as file:
    json.dump([program, *arguments], file)
"""
_PROGRAMS = ("normforge", "python", "make", "pytest", "pip", "git")


@dataclass(frozen=True)
class Shell:
    """A folder for a page's commands, with programs that stand in for the real ones."""

    folder: Path
    bin: Path
    calls: Path

    def run(self, text: str) -> str:
        """Run a piece of shell, check each call that was only written down, and return what was printed."""
        # Errors stand among what is printed.
        argv, path = ("bash", "-eu", "-c", f"exec 2>&1\n{text}"), f"{self.bin}:/usr/bin:/bin"
        done = command(*argv, cwd=self.folder, PATH=path, NORMFORGE_CACHE=str(self.folder / ".cache"))
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        for name in sorted(self.calls.iterdir()):
            check(json.loads(name.read_text()))
            name.unlink()
        return done.stdout


def make_shell(base: Path) -> Shell:
    """Lay out a checkout's folders, a user's program, and the stand-ins."""
    shell = Shell(base / "normforge", base / "bin", base / "calls")
    for folder in (shell.folder, shell.bin, shell.calls):
        folder.mkdir(parents=True)
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, shell.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, shell.folder / name)
    for name, text in _BESIDE.items():
        (shell.folder / name).write_text(text)
    for name in _PROGRAMS:
        path = shell.bin / name
        path.write_text(_STAND_IN.format(calls=str(shell.calls)))
        path.chmod(0o755)
    (shell.folder / ".venv").mkdir()
    (shell.folder / ".venv" / "bin").symlink_to(shell.bin)
    return shell


def check(call: Sequence[str]) -> None:
    """Check a command with the real program's parser.

    Raises:
        AssertionError: the program would refuse the arguments, or is not known here.
    """
    program, *arguments = call
    assert program in _CHECKS, f"no row of _CHECKS says how to check {program}"
    _CHECKS[program](arguments)


class _ReadError(Exception):
    """Raised in place of what a program would do once it has read its arguments."""


def _reads(main: Callable[..., object], arguments: Sequence[str]) -> None:
    """A program's `main` accepts the arguments; nothing behind its parser runs."""
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: object, **others: object) -> object:
        real(self, *given, **others)
        raise _ReadError

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse):
        try:
            main(list(arguments))
        except _ReadError:
            return
        except SystemExit as refused:
            raise AssertionError(f"the arguments are refused: {arguments}") from refused
    raise AssertionError(f"no parser read the arguments: {arguments}")


def _check_normforge(arguments: Sequence[str]) -> None:
    verb, *rest = arguments
    assert verb in cli.VERBS, f"normforge has no verb {verb}"
    _reads(cli.VERBS[verb].parser_of(f"normforge {verb}").request, rest)


def _check_python(arguments: Sequence[str]) -> None:
    if arguments[:2] == ["-m", "proving"]:
        _reads(import_module(f"proving.{arguments[2]}.command").main, arguments[3:])
    elif arguments[0] == "-m" and arguments[1].split(".")[0] == "benchmarks":
        name = arguments[1] if arguments[1] != "benchmarks" else "benchmarks.cli"
        _reads(import_module(name).main, arguments[2:])
    elif arguments[0] == "-m":
        assert arguments[1] in ("venv", "pip"), f"nothing checks python -m {arguments[1]}"
    else:
        assert arguments[0] == PROGRAM or (ROOT / arguments[0]).exists(), f"there is no {arguments[0]}"


def _check_make(arguments: Sequence[str]) -> None:
    # -n prints what would be done. The environment is taken to be there, or it would be made.
    make = [there(shutil.which("make")), "-n", "-o", ".venv/.ready", *arguments]
    done = command(*make, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "Makefile").read_text()
    for name in (argument.partition("=")[0] for argument in arguments if "=" in argument):
        assert re.search(rf"^{name} \?=", text, re.MULTILINE), f"the Makefile has no {name}"


def _check_paths(arguments: Sequence[str]) -> None:
    """Check that files which arguments name are there; pip's, git's and pytest's own words are not checked."""
    for argument in arguments:
        named = argument.startswith("tests/") or argument.endswith(".txt")
        assert not named or (ROOT / argument.partition("::")[0]).exists(), argument


_CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "normforge": _check_normforge,
    "python": _check_python,
    "make": _check_make,
    "pytest": _check_paths,
    "pip": _check_paths,
    "git": _check_paths,
}


ROOT = Path(__file__).resolve().parent.parent.parent

PAGES = tuple(sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]))


def doc(name: str) -> Path:
    """Return the page of docs/ that has this name, whichever folder it is in."""
    (page,) = (ROOT / "docs").rglob(f"{name}.md")
    return page


@dataclass(frozen=True)
class Block:
    """A fenced piece of code.

    Attributes:
        page: the file.
        line: of the page, where its first line stands.
        language: the word behind the fence.
        text: what is between the fences, its indentation in a list taken off.
    """

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} ({self.language})"


_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[(?:[^\]]|\n)*?\]\(([^)\s]+)\)")


def blocks(page: Path) -> list[Block]:
    """Return a page's code blocks, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found["language"], textwrap.dedent(found["text"]))
        for found in _FENCED.finditer(text)
    ]


def prose(page: Path) -> str:
    """Return a page's text without its code blocks."""
    return _FENCED.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """Yield the targets of a page's links and pictures."""
    yield from _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))


def first_sentence(page: Path) -> str:
    """Return the first sentence below a page's title."""
    below = prose(page).partition("\n")[2].strip()
    return re.split(r"(?<=[.:])\s", below.replace("\n", " "), maxsplit=1)[0]

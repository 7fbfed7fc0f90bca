"""The list of mutants and of the tests that caught them, as text."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version

from .mutant import Suite
from .tree import ROOT
from .trial import Outcome

_HEAD = """# Mutants

Read this to know what the tests notice. Listed are edits that break normforge on purpose, each in a copy of the tree,
and the test that fails of it: the first of those chosen for it, which passes without the edit. `make mutants` tries
them all, fails if one survives, and writes this page; the edits are in `tests/mutants/table/`. Tests that compare
generated text with a copy of it are never chosen.
"""


def revision() -> str:
    """What was tried: the commit, and whether files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "runtime", "tools", "codegen", "templates", "generated", "tests")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def markdown(outcomes: Sequence[Outcome], tried: str, seconds: float) -> str:
    """The page; `tried` is the revision."""
    about = f"Python {platform.python_version()}, torch {version('torch')}, Triton {version('triton')}"
    verdicts = [outcome.verdict.value for outcome in outcomes]
    counted = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    lines = [_HEAD, f"Revision {tried}, {about}: {counted} of {len(outcomes)}, in {seconds:.0f} s.", ""]
    area = ""
    for outcome in outcomes:
        mutant = outcome.mutant
        if mutant.file.partition("/")[0] != area:
            area = mutant.file.partition("/")[0]
            lines += [f"## {area}/", "", "| file | what it breaks | caught by |", "|---|---|---|"]
        compiled = " (compiled)" if mutant.suite is Suite.COMPILE else ""
        caught = f"`{_escaped(outcome.said)}`{compiled}" if outcome.said else ""
        lines.append(
            f"| {mutant.file.partition('/')[2]} | {_escaped(mutant.breaks)} | "
            f"{'' if outcome.caught else outcome.verdict.value + ': '}{caught} |"
        )
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""A copy of the working tree that is imported and tested by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from .mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]

# What the committed kernels are made from: an edit there shows once they are made anew.
_GENERATOR = ("templates/", "codegen/", "instances.yaml")
# Where the copy is laid out as it would be installed; the same as the Makefile's lint has it.
_LINKS = Path(".links")
_PACKAGES = ("codegen", "generated", "templates", "tools")


class GenerateError(Exception):
    """The generator refuses to make anything of an edit."""


def present_files() -> tuple[str, ...]:
    """Return the files of the working tree, from its root: those that git tracks or would, or all without git."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        listed = [str(path) for path in paths if not any(part.startswith((".", "__")) for part in path.parts[:-1])]
    return tuple(name for name in dict.fromkeys(listed) if (ROOT / name).is_file())


@contextmanager
def copied(source: Path, files: Iterable[str]) -> Iterator[Path]:
    """Return a copy of some of a tree's files, in which `import normforge` finds the copy."""
    with TemporaryDirectory(prefix="normforge-mutant-", ignore_cleanup_errors=True) as made:
        tree = Path(made).resolve()
        for name in files:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, tree / name)
        package = tree / _LINKS / "normforge"
        package.mkdir(parents=True)
        for part in (*(tree / "runtime").iterdir(), *(tree / name for name in _PACKAGES)):
            (package / part.name).symlink_to(part)
        yield tree


def environment(tree: Path) -> dict[str, str]:
    """Return the variables of a process that takes normforge from a copy: one core, and no setting from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NORMFORGE_", "TRITON_"))}
    kept |= {"PYTHONPATH": str(tree / _LINKS), "NORMFORGE_CACHE": str(tree / ".generated-on-demand")}
    return kept | {"OMP_NUM_THREADS": "1"}


def edit(tree: Path, mutant: Mutant) -> None:
    """Make a mutant's edit in a copy, and make the kernels anew if they come from what it edits.

    Raises:
        EditError: the edit does not fit.
        GenerateError: the generator fails.
    """
    path = tree / mutant.file
    path.write_text(mutant.applied(path.read_text()))
    if mutant.file.startswith(_GENERATOR):
        made = subprocess.run(
            [sys.executable, "generate.py"],
            cwd=tree,
            env=environment(tree),
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise GenerateError(made.stderr.strip())

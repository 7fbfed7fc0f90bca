"""A folder with all that a command may read and write, documents cut about, and what has to hold whatever was given."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from normforge.codegen.groups import Span
from normforge.codegen.values import Norm
from normforge.selection.table import load_folder
from normforge.tools import cli

from ..calling import Outcome, outcome_of
from ..folders import distinct_tiles
from ..properties.seed import FIRE

# In names and values that are never to reach an emitted file, and what such a one might make if it were run.
CANARY = "INJECTED"

_PREFIXES = "|".join([*(norm.prefix for norm in Norm), *(span.prefix for span in Span)])
_SHARED = "__init__|(?:group_)?primitives|dispatch|finalise"
_NAMES = re.compile(rf"(?:{_SHARED}|(?:{_PREFIXES})_(?:fwd|bwd)_\w+)\.py", re.ASCII)
# What is nobody's: Python's cache, and the lock that a killed run leaves.
PASSING = ("__pycache__", ".normforge-lock")
_KERNEL = re.compile(r"^def (\w+)\(", re.MULTILINE)


# Runs `normforge` with arguments; argparse's own refusals count as any other.
command = partial(outcome_of, cli.main)


@contextmanager
def new_world() -> Iterator[Path]:
    """An empty folder, for one example."""
    with tempfile.TemporaryDirectory(prefix="normforge-fire-") as path:
        yield Path(path)


def snapshot(folder: Path, without: Path | None = None) -> dict[str, bytes | str]:
    """What lies in a folder: by path, a file's bytes, a link's target, or "folder"."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if without is not None and (path == without or without in path.parents):
            continue
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        else:
            found[name] = path.read_bytes() if path.is_file() else "folder"
    return found


def generate(world: Path, manifest: str | bytes, *options: str) -> Outcome:
    """Run `normforge generate` into a world's folder `k`, and hold what it left against what has to be."""
    path, out = world / "mine.yaml", world / "k"
    path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    outside, before = snapshot(world, without=out), snapshot(out)
    outcome = command(["generate", "--manifest", str(path), *options, "--out", str(out)])
    assert snapshot(world, without=out) == outside, "something outside --out was changed"
    assert "Traceback" not in outcome.err
    if outcome.status == 0:
        assert outcome.err == ""
        whole(out)
    else:
        refused(outcome, "normforge generate")
        assert snapshot(out) == before, "it was refused, and something was written"
    return outcome


def refused(outcome: Outcome, prog: str) -> None:
    """Hold a refusal against its form: status 2, and one line on standard error."""
    assert outcome.status == 2
    # Where argparse refuses, it prints the usage first.
    line = outcome.err.splitlines()[-1] if outcome.err.startswith("usage: ") else outcome.err.removesuffix("\n")
    assert line.startswith(f"{prog}: error: ")
    assert line.isprintable(), line


def whole(out: Path) -> None:
    """Hold a generated folder against what has to be: all files are Python, and hold every kernel the table names."""
    for path in out.iterdir():
        if path.name not in PASSING:
            assert path.is_file()
            assert not path.is_symlink()
            assert _NAMES.fullmatch(path.name), path.name
            _look_at(path.name, path.read_text())
    loads(out)


def loads(out: Path) -> None:
    """Hold a folder, in which temporary files may lie, against its own table."""
    listed = list(load_folder(out))
    assert listed
    for entry in listed:
        there = set(_KERNEL.findall((out / f"{entry.mode}.py").read_text()))
        missing = {entry.kernel(tile.pipeline) for tile in distinct_tiles(entry)} - there
        assert not missing, f"{entry.name} names kernels that are not there: {missing}"


@lru_cache(1000)
def _look_at(name: str, text: str) -> None:
    """Hold a file against what has to be; many examples have the same ones."""
    compile(text, name, "exec")
    assert CANARY not in text


@st.composite
def cut(draw: st.DrawFn, text: Any, inserted: st.SearchStrategy[Any]) -> Any:
    """A text, or bytes, without a part, with a part twice, or with another in between."""
    at, to = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    to = min(to, at + 40)
    other = draw(inserted)
    ways = (text[:at], text[:at] + text[to:], text[:to] + text[at:], text[:at] + other + text[at:], text[:0])
    return draw(st.sampled_from(ways))


# A slice by default, of the run's seed (`tests.properties.seed`): the same each time, so that a fresh clone does not
# fail by chance. With NORMFORGE_FIRE=10 a test takes ten times as many, of a fresh seed, which the run says.
_TIMES = int(os.environ.get(FIRE) or 1)


def fire(examples: int) -> settings:
    """The settings of a test that takes so many examples by default; a decorator."""
    return settings(
        max_examples=examples * _TIMES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )

"""Whatever somebody made of a template: an error of one line that names it, and nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from normforge.codegen import emit

from ..thorough import THOROUGH
from .documents import HOSTILE
from .world import generate

MANIFEST = "groups: {plain: {norm: [layer, rms], dtype_in: bf16, n: n128}}\n"

FRAGMENTS = [text.encode("latin-1") for text in HOSTILE["templates"]]


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A template of a copy that the generator reads instead of its own."""
    shutil.copytree(emit.TEMPLATES, tmp_path / "templates")
    monkeypatch.setattr(emit, "TEMPLATES", tmp_path / "templates")
    emit.clear_caches()
    yield tmp_path / "templates" / "rows.py.j2"
    emit.clear_caches()


def said_of(template: Path, fragment: bytes) -> str:
    """Put a fragment on a template's fifth line, and return what the refusal says."""
    lines = template.read_bytes().splitlines(keepends=True)
    template.write_bytes(b"".join((*lines[:4], fragment + b"\n", *lines[4:])))
    return generate(template.parents[1], MANIFEST).err


@THOROUGH
@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_template_that_cannot_be_rendered_is_named(fragment: bytes, template: Path) -> None:
    assert str(template.parent) in said_of(template, fragment)


def test_a_template_that_is_gone_is_named(template: Path) -> None:
    template.unlink()
    assert str(template.parent) in generate(template.parents[1], MANIFEST).err


@pytest.mark.parametrize(
    ("fragment", "said"),
    [
        (b"{{ nope }}", "the template cannot be rendered: UndefinedError: 'nope' is undefined; mend it"),
        (b"{% nope %}", "this is no template: Encountered unknown tag 'nope'."),
    ],
)
def test_the_line_of_a_mistake_is_named(fragment: bytes, said: str, template: Path) -> None:
    assert said_of(template, fragment).startswith(f"normforge generate: error: {template}:5: {said}")

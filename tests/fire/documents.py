"""Manifests and tiles, as text: legal in their structure, hostile in places, and cut about."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from string import Template

import yaml
from hypothesis import strategies as st

from normforge.codegen.axes import AXES
from normforge.codegen.instance import Tile
from normforge.codegen.tile_tables import own_tables
from normforge.codegen.tiling import STANDARD_LENGTHS
from normforge.codegen.values import Pipeline

from .world import CANARY, cut

HOSTILE: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text())
_WORDS = {"CANARY": CANARY, "LONG": "x" * 300, "ENDLESS": "9" * 5000}
NAMES, SCALARS = ([Template(text).substitute(_WORDS) for text in HOSTILE[what]] for what in ("names", "scalars"))

_BOMB = "bomb:\n" + "".join(f"  - &b{i} [{', '.join([f'*b{i - 1}'] * 9 if i else ['x'] * 9)}]\n" for i in range(9))
_NESTED = ("[" * 3000, "{a: " * 3000, "- " * 3000)


def quoted(text: str) -> str:
    """A text as a scalar that YAML reads back as it is."""
    return json.dumps(text)


names = st.one_of(st.sampled_from(NAMES).map(quoted), st.sampled_from(SCALARS), st.text(max_size=8).map(quoted))
scalars = st.one_of(st.sampled_from(SCALARS), names)


def _mostly(right: st.SearchStrategy[str], wrong: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.integers(0, 14).flatmap(lambda at: wrong if at == 7 else right)


def _words(words: tuple[str, ...]) -> st.SearchStrategy[str]:
    one = st.sampled_from(words)
    several = st.lists(one, min_size=1, max_size=2, unique=True).map(lambda chosen: f"[{', '.join(chosen)}]")
    return _mostly(st.one_of(one, one, one, several), scalars)


@st.composite
def _buckets(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """The lines of `buckets:`, and their names."""
    ends = sorted(draw(st.sets(st.one_of(st.integers(1, 40000), st.integers(1, 10**18)), max_size=4)))
    named, first = [], 1
    for last in (*ends, None):
        named.append((f"n{last or 'big'}", f"{first}..{last or ''}"))
        first = (last or 0) + 1
    lines = [f"  {draw(_mostly(st.just(name), names))}: {draw(_mostly(st.just(to), scalars))}\n" for name, to in named]
    return "buckets:\n" + "".join(lines), tuple(name for name, _ in named)


@st.composite
def _group(draw: st.DrawFn, buckets: tuple[str, ...], needed: bool) -> str:
    lines = []
    for axis in AXES:
        must = needed and axis.default is None
        if must or draw(st.integers(0, 5)) == 0:
            lines.append(f"    {draw(_mostly(st.just(axis.name), names))}: {draw(_words(axis.words))}\n")
    if draw(st.booleans()):
        lines.append(f"    n: {draw(_words(('all', *buckets)))}\n")
    return "".join(draw(st.permutations(lines)))


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    """A manifest, of which a third or so can be used."""
    standard = tuple("nbig" if last is None else f"n{last}" for last in STANDARD_LENGTHS)
    text, buckets = draw(_buckets()) if draw(st.booleans()) else ("", standard)
    if draw(st.integers(0, 3)) == 0:
        text += "defaults:\n" + (draw(_group(buckets, needed=False)) or "    {}\n")
    text += "groups:\n"
    for index in range(draw(st.integers(1, 3))):
        name = f"g{index}" if draw(st.booleans()) else draw(names)
        text += f"  {name}:\n{draw(_group(buckets, needed=True))}"
    return draw(_cut(text))


_NUMBERS = (*(1 << at for at in range(16)), 0, 3, 5, 7, 48, 1 << 20, 1 << 31, 1 << 63, 10**17, 10**30)
_FIELDS = ("rows", "block", "warps", "resident", "held", "stages")


# Tiles that somebody has measured or a rule gives.
_PAIRS = [pair for rows in own_tables()["sm_90"].rows.values() for _, pair in rows]
_KNOWN = tuple(dict.fromkeys(tile for pair in _PAIRS for tile in (pair.large, pair.small)))


@st.composite
def tiles(draw: st.DrawFn) -> str:
    """A tile, which a kernel may or may not be able to have."""
    tile = draw(st.sampled_from(_KNOWN))
    values = {field.name: str(getattr(tile, field.name)) for field in fields(Tile)} | {"pipeline": tile.pipeline.value}
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2)))):
        name = draw(st.sampled_from(("pipeline", *_FIELDS)))
        if name == "pipeline":
            values[name] = draw(_words(tuple(pipeline.value for pipeline in Pipeline)))
        else:
            values[name] = draw(_mostly(st.sampled_from(_NUMBERS).map(str), scalars))
    return f"{{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


@st.composite
def _cut(draw: st.DrawFn, text: str) -> bytes:
    """A text, or what an editor, a merge or a broken copy may have made of it."""
    whole = (text + _BOMB, *(text + nested for nested in _NESTED), text.replace("\n", "\r\n"), text.upper())
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2)))):
        text = draw(st.one_of(cut(text, scalars), cut(text, scalars), st.sampled_from(whole)))
    data = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 19)) == 0:
        data = draw(cut(data, st.sampled_from((b"\xff\xfe", b"\xed\xa0\x80", b"\xa0"))))
    return data

"""Kinds of call in plain words, as recordings keep them: what decides which kernels serve, on whatever GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from .codegen.errors import IllegalCombinationError
from .codegen.groups import GroupMode, mode_named

# Classes of M, each with the tile that it runs on: up to the table's SMALL_M, up to its SOME_M, up to what an i32
# counts, and beyond.
ROWS = FEW, SOME, MANY, MOST = ("few", "some", "many", "most")
# Classes of common calls.
USUAL_ROWS = FEW, SOME, MANY
# The backward kernels of modulated norms take samples of this many rows or more: for shorter samples, programs would
# write about as much as they read.
LEAST_ROWS_OF_SAMPLE = 8
# Each sample has a program or more, and the second dimension of a grid takes 65535.
MOST_SAMPLES = 2**15
# The largest M that kernels count rows up to as an i32: a loop over rows looks two rounds beyond the last, and a round
# of the shortest, 64 a program, may have 606208 where a multiprocessor holds as many programs as any does.
MOST_ROWS_IN_I32 = 2**31 - 2**21

# Names of the sizes, of row norms, of row norms behind an all-reduce and of GroupNorm.
ROW_SIZES, REDUCED_SIZES, GROUP_SIZES = ("n",), ("n", "ranks"), ("channels", "groups", "positions")
# The kernels of norms of heads with their rotary embedding, each a mode by itself, and the names of their sizes.
ROTARY = ("qk_norm_rope_fwd", "qk_norm_rope_bwd", "qk_norm_rope_across_fwd", "qk_norm_rope_across_bwd")
# 0 or 1.
FLAGS = ("interleaved", "centres", "averages", "rounds_first", "whole", "alternates")
# 0 where there are no positions of several axes, no cache of blocks, or no keys.
COUNTS = ("height", "width", "slots")
ROTARY_SIZES = ("n", "q_heads", "k_heads", "rotary_dim", *FLAGS, *COUNTS)

_NAME = re.compile(r"\w+", re.ASCII)
_STRIDES = re.compile(r"\d{1,18}(?:x\d{1,18}x\d{1,18})*", re.ASCII)
_LARGEST = 10**18

Words = tuple[tuple[str, str], ...]


@dataclass(frozen=True, order=True)
class CallKind:
    """A key of calls that share their kernels on any GPU: it holds no addresses, and only the class of M.

    Attributes:
        mode: the mode's name.
        sizes: the row length, "n", and "ranks" behind an all-reduce; of GroupNorm "channels", "groups" and "positions";
            of heads `ROTARY_SIZES`.
        dtypes: of the tensors that are read and written, by the kernels' names for them: torch's names of types.
        strides: of tensors with gaps between rows: elements from row to row, or for rows on several strides the
            strides with the sizes between them, "6144x32x128". They are the smallest that no kernel can tell from the
            call's.
        misaligned: the tensors that start at no multiple of 16 bytes.
        rows: the class of M, one of `ROWS`.
        invariant: whether they are batch invariant.
        beside: the kinds of the further problems that share the launch, in order; see `normforge.rms_norms`.
    """

    mode: str
    sizes: tuple[tuple[str, int], ...]
    dtypes: Words = ()
    strides: Words = ()
    misaligned: tuple[str, ...] = ()
    rows: str = ""
    invariant: bool = False
    beside: tuple[CallKind, ...] = ()

    @property
    def size(self) -> dict[str, int]:
        """The sizes by name."""
        return dict(self.sizes)

    @property
    def n(self) -> int:
        """The row length; of GroupNorm, how many elements a group has."""
        size = self.size
        return size["n"] if "n" in size else size["channels"] // size["groups"] * size["positions"]

    def with_rows(self, rows: str) -> CallKind:
        """Return the kind with another class of M, that of all problems of a launch."""
        return replace(self, rows=rows, beside=tuple([each.with_rows(rows) for each in self.beside]))

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes)
        return ", beside ".join([f"{self.mode} with {sizes} and {self.rows} rows", *map(str, self.beside)])


def lines_of(kinds: Iterable[CallKind]) -> list[str]:
    """Return a line of JSON per kind, with all its classes of rows, in an order independent of that of `kinds`."""
    apart_from_rows = partial(replace, rows="")
    ordered = sorted(set(kinds), key=apart_from_rows)
    return [json.dumps(_document(list(alike))) for _, alike in groupby(ordered, apart_from_rows)]


def _document(alike: list[CallKind]) -> dict[str, Any]:
    first, classes = alike[0], {kind.rows for kind in alike}
    document: dict[str, Any] = {"mode": first.mode, **first.size, "rows": [word for word in ROWS if word in classes]}
    document |= {name: dict(getattr(first, name)) for name in ("dtypes", "strides") if getattr(first, name)}
    if first.misaligned:
        document["misaligned"] = list(first.misaligned)
    if first.beside:
        document["beside"] = [_document([each]) for each in first.beside]
    return {**document, "invariant": True} if first.invariant else document


def read_line(line: str) -> Iterator[CallKind]:
    """Yield the kinds of a line that `lines_of` wrote, which a user may have edited.

    Raises:
        ValueError: it is no such line; the message says why.
    """
    try:
        document = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    yield from _kinds(document)


def _kinds(document: Any) -> Iterator[CallKind]:
    """Yield the kinds of a line, or the kind of a further problem."""
    if not isinstance(document, dict) or not isinstance(document.get("mode"), str):
        raise ValueError("it names no mode")
    try:
        names: tuple[str, ...] = ROTARY_SIZES
        if document["mode"] not in ROTARY:
            mode = mode_named(document["mode"])
            names = (
                GROUP_SIZES if isinstance(mode, GroupMode) else REDUCED_SIZES if mode.reduce.exchanges else ROW_SIZES
            )
    except IllegalCombinationError as error:
        raise ValueError(str(error)) from error
    known = ("mode", *names, "rows", "dtypes", "strides", "misaligned", "invariant", "beside")
    unknown = [key for key in document if key not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    rows = document.get("rows")
    if not isinstance(rows, list) or not rows or not all(word in ROWS for word in rows):
        raise ValueError(f"rows is {rows!r}, and takes some of {', '.join(ROWS)}")
    misaligned = document.get("misaligned", [])
    if not isinstance(misaligned, list) or not all(_is(_NAME, name) for name in misaligned):
        raise ValueError(f"misaligned is {misaligned!r}, and takes names of tensors")
    invariant = document.get("invariant", False)
    if not isinstance(invariant, bool):
        raise ValueError(f"invariant is {invariant!r}, and takes true or false")
    beside = document.get("beside", [])
    if not isinstance(beside, list):
        raise ValueError(f"beside is {beside!r}, and takes a list of further problems")
    problems = tuple([kind for each in beside for kind in _kinds(each)])
    for word in dict.fromkeys(rows):
        yield CallKind(
            mode=document["mode"],
            sizes=tuple([(name, _size(document, name)) for name in names]),
            dtypes=_words(document, "dtypes", _NAME),
            strides=_words(document, "strides", _STRIDES),
            misaligned=tuple(sorted(set(misaligned))),
            rows=word,
            invariant=invariant,
            beside=problems,
        )


def _size(document: Mapping[str, Any], name: str) -> int:
    size = document.get(name)
    least, most = int(name not in (*FLAGS, *COUNTS, "k_heads")), 1 if name in FLAGS else _LARGEST
    if type(size) is not int or not least <= size <= most:
        takes = "0 or 1" if most == 1 else f"a whole number from {least}"
        raise ValueError(f"{name} is {size!r}, and takes {takes}")
    return size


def _words(document: Mapping[str, Any], name: str, legal: re.Pattern[str]) -> Words:
    words = document.get(name, {})
    if not isinstance(words, dict) or not all(_is(_NAME, key) and _is(legal, word) for key, word in words.items()):
        raise ValueError(f"{name} is {words!r}, and takes words by the names of tensors")
    return tuple(sorted(words.items()))


def _is(legal: re.Pattern[str], word: object) -> bool:
    return isinstance(word, str) and legal.fullmatch(word) is not None

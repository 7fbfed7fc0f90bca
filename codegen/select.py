"""Choose instances of a manifest: --filter by globs on names, --where by conditions on axes."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from heapq import nlargest
from typing import Any

from .axes import AXES, SAME, Axis
from .errors import SelectionError
from .groups import AnyMode
from .instance import Bucket
from .manifest import Asked, Manifest
from .progress import progress
from .words import unknown

_N = "n"
_AXIS_OF = {axis.name: axis for axis in AXES}
_KEYS = (*_AXIS_OF, _N)

_CONDITION = re.compile(r"(?P<key>\w+)\s*(?P<comparison><=|>=|!=|=|<|>)\s*(?P<words>[^<>=!]*)")
_ORDERS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_LENGTH = re.compile(r"[1-9][0-9]{0,17}")
_NAMES_SHOWN = 5
_TELLING = 3


@dataclass(frozen=True)
class Condition:
    """A condition of --where: its text, its axis, and the test that a mode must pass, or for n a bucket."""

    text: str
    key: str
    met_by: Callable[[Any], bool]


def select(manifest: Manifest, globs: str | None, where: str | None) -> Manifest:
    """Keep the instances that match one of the globs and meet every condition.

    Args:
        manifest: the manifest to choose from.
        globs: shell patterns on instance names, separated by commas; None keeps every name.
        where: conditions on axes, separated by commas; None sets none.

    Raises:
        SelectionError: the selection cannot be parsed, or nothing is left.
    """
    asked: Sequence[Asked] = manifest.asked
    if globs is not None:
        asked = _matching(asked, globs)
    if where is not None:
        for condition in parse_where(where):
            asked = _meeting(asked, condition)
    return replace(manifest, asked=tuple(asked))


def parse_where(text: str) -> list[Condition]:
    """Parse the conditions of a --where.

    A word axis is compared with = or !=, with alternatives separated by |. n is compared with = and != by the bucket
    that serves a length, and with <, <=, > and >= by a bucket's last length, which is infinite without a cap.

    Raises:
        SelectionError: a condition is malformed, or names an axis or a word that does not exist.
    """
    return [_parse_condition(part) for part in _parts(text, "--where")]


def _matching(every: Sequence[Asked], globs: str) -> Sequence[Asked]:
    kept: dict[AnyMode, set[Bucket]] = {}
    for glob in _parts(globs, "--filter"):
        matches = re.compile(fnmatch.translate(glob)).match
        head = re.split(r"[*?\[]", glob, maxsplit=1)[0]
        matching = [
            (asked.mode, bucket)
            for asked in every
            if f"{asked.mode.name}_".startswith(head[: len(asked.mode.name) + 1])
            for bucket in asked.groups
            if matches(f"{asked.mode.name}_{bucket.name}")
        ]
        if not matching:
            near = _nearest(glob, [f"{asked.mode.name}_{bucket.name}" for asked in every for bucket in asked.groups])
            hint = "" if glob.endswith("*") else "; a glob must match a whole name, so end it in * to match a prefix"
            raise SelectionError(f"--filter {glob!r} matches no instance; the nearest are {', '.join(near)}{hint}")
        for mode, bucket in matching:
            kept.setdefault(mode, set()).add(bucket)
    return [asked.over(kept[asked.mode]) for asked in every if asked.mode in kept]


def _nearest(glob: str, names: Collection[str]) -> list[str]:
    # Names are similar and longer than a glob, so count how many characters of the glob a name holds, in pieces long
    # enough to be meaningful.
    matcher = SequenceMatcher(b=re.sub(r"[*?\[\]!]", "", glob), autojunk=False)

    def found(name: str) -> int:
        matcher.set_seq1(name)
        sizes = (block.size for block in matcher.get_matching_blocks())
        return sum(size for size in sizes if size >= _TELLING)

    return nlargest(_NAMES_SHOWN, progress(names, "names compared"), key=found)


def _meeting(every: Sequence[Asked], condition: Condition) -> Sequence[Asked]:
    if condition.key == _N:
        buckets = {bucket for bucket in _buckets(every) if condition.met_by(bucket)}
        kept = [asked for asked in (asked.over(buckets) for asked in every) if asked.groups]
    else:
        kept = [asked for asked in every if condition.met_by(asked.mode)]
    if not kept:
        number = sum(len(asked.groups) for asked in every)
        raise SelectionError(
            f"--where {condition.text!r} leaves none of the {number} instances that it was applied to; "
            f"their {condition.key}: {', '.join(_present(condition.key, every))}"
        )
    return kept


def _buckets(every: Sequence[Asked]) -> Iterable[Bucket]:
    return dict.fromkeys(bucket for asked in every for bucket in asked.groups)


def _present(key: str, every: Sequence[Asked]) -> Iterable[str]:
    if key == _N:
        return [f"{bucket.name} ({bucket})" for bucket in _buckets(every)]
    return dict.fromkeys(_AXIS_OF[key].word_of(asked.mode) for asked in every)


def _parts(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise SelectionError(f"{option} {text!r} has an empty part; separate parts with single commas")
    return parts


def _parse_condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise SelectionError(
            f"--where {text!r} is not a condition; write axis=word, axis=word|word or axis!=word, "
            "or n with =, !=, <, <=, > or >="
        )
    key, comparison = match["key"], match["comparison"]
    if key not in _KEYS:
        raise SelectionError(f"--where {text!r}: {unknown('axis', key, _KEYS)}")
    words = [word.strip() for word in match["words"].split("|")]
    if not all(words):
        raise SelectionError(f"--where {text!r} lacks a word; write {key}{comparison}word, or word|word")
    if key == _N:
        return Condition(text, key, _on_bucket(text, comparison, words))
    if comparison in _ORDERS:
        raise SelectionError(f"--where {text!r}: {key} has no order; compare it with = or !=, only n with {comparison}")
    return Condition(text, key, _on_mode(text, comparison, _AXIS_OF[key], words))


def _on_mode(text: str, comparison: str, axis: Axis, words: Sequence[str]) -> Callable[[AnyMode], bool]:
    for word in words:
        if word not in axis.values:
            raise SelectionError(f"--where {text!r}: {unknown(axis.name, word, axis.words)}")
    wanted = comparison == "="

    def met_by(mode: AnyMode) -> bool:
        return any(_is(mode, axis, word) for word in words) is wanted

    return met_by


def _is(mode: AnyMode, axis: Axis, word: str) -> bool:
    if word == SAME:
        return mode.dtype_out is mode.dtype_in
    return axis.word_of(mode) == word


def _on_bucket(text: str, comparison: str, words: Sequence[str]) -> Callable[[Bucket], bool]:
    lengths = [_length(text, word) for word in words]
    if comparison not in _ORDERS:
        wanted = comparison == "="
        return lambda bucket: any(length in bucket for length in lengths) is wanted
    if len(lengths) > 1:
        raise SelectionError(f"--where {text!r}: {comparison} takes one length; alternatives go with = or !=")
    order = _ORDERS[comparison]
    return lambda bucket: order(_longest(bucket), lengths[0])


def _longest(bucket: Bucket) -> float:
    return float("inf") if bucket.last is None else bucket.last


def _length(text: str, word: str) -> int:
    if _LENGTH.fullmatch(word) is None:
        raise SelectionError(
            f"--where {text!r}: n compares with a row length, a whole number from 1, not {word!r}; "
            "choose a bucket by its name with --filter"
        )
    return int(word)

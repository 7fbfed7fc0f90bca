"""Read the buckets of a manifest, check that they serve every N exactly once, and read the buckets of a group."""

from __future__ import annotations

import re
from collections.abc import Sequence

from yaml.nodes import Node

from .document import Section
from .instance import Bucket
from .tiling import ladder_of

ALL = "all"
RANGE = "a range, first..last or first.."
_RANGE = re.compile(r"([1-9][0-9]{0,17})\.\.([1-9][0-9]{0,17})?")


def read_ladder(section: Section, node: Node) -> tuple[Bucket, ...]:
    """Read `buckets:`, which must ascend without gaps from 1 and end in a bucket without a cap."""
    pairs = section.mapping(node, "buckets, as name: first..last")
    if not pairs:
        raise section.error(node, "there are none; leave buckets out to get the standard ladder")
    written = [(pair.key, _bucket(section, name, pair.value)) for name, pair in pairs.items()]
    for at, bucket in written[:-1]:
        if bucket.last is None:
            raise section.error(
                at, f"{bucket.name} ({bucket}) has no cap, so no bucket can follow it; write it last, or give it a cap"
            )
    # The last lengths determine the ladder; any first length or name that differs is a mistake.
    ladder = ladder_of(tuple(bucket.last for _, bucket in written))
    for index, ((at, bucket), right) in enumerate(zip(written, ladder, strict=True)):
        if bucket.first != right.first:
            before = ladder[index - 1] if index else None
            raise section.error(at, _misplaced(bucket, right, before))
        if bucket.name != right.name:
            raise section.error(
                at, f"{bucket.name} ({bucket}) must be called {right.name}: names of instances end in it; rename it"
            )
    at, longest = written[-1]
    if longest.last is not None:
        raise section.error(
            at,
            f"{longest.name} ({longest}) is the last bucket and has a cap, so no kernel would serve a longer row; "
            f"add nbig: {longest.last + 1}..",
        )
    return ladder


def _bucket(section: Section, name: str, node: Node) -> Bucket:
    return read_range(section, name, node, section.string(node, name, RANGE))


def read_range(section: Section, name: str, node: Node, text: str) -> Bucket:
    """Return the row lengths that the text at a node means."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise section.error(node, f"{name} takes {RANGE}, from 1 up, not {text!r}")
    first, last = int(match[1]), int(match[2]) if match[2] else None
    if last is not None and last < first:
        raise section.error(node, f"{name} ({text}) ends before it starts; write first..last")
    return Bucket(name, first, last)


def read_served(section: Section, node: Node, what: str, buckets: Sequence[Bucket]) -> tuple[str, ...]:
    """Return the names of the buckets that a group asks for: by name, by row length, or by a range of row lengths.

    Several lengths may fall into one bucket. A name that is listed twice, or beside all, is refused.
    """
    legal = (ALL, *(bucket.name for bucket in buckets))
    items = section.items(node, what)
    texts = section.once(what, [(item, _length_or_name(section, item, what, legal)) for item in items])
    if ALL in texts:
        if len(texts) > 1:
            raise section.error(
                node, f"{what} lists all beside other buckets, and all is every bucket; keep one or the other"
            )
        return texts
    asked = [_asked(section, item, what, text) for item, text in zip(items, texts, strict=True)]
    return tuple(bucket.name for bucket in buckets if any(_serves(bucket, each) for each in asked))


def _length_or_name(section: Section, node: Node, what: str, legal: Sequence[str]) -> str:
    if section.is_number(node):
        length = section.integer(node, what, "a row length, from 1 up")
        if length < 1:
            raise section.error(node, f"{what} takes row lengths from 1 up, not {length}")
        return str(length)
    if section.is_string(node) and ".." in str(node.value):
        return str(node.value)
    return section.word(node, what, legal)


def _asked(section: Section, node: Node, what: str, text: str) -> Bucket | str:
    """Return the row lengths, or the name of a bucket, that an item means."""
    if text.isdecimal():
        return Bucket(what, int(text), int(text))
    return read_range(section, what, node, text) if ".." in text else text


def _serves(bucket: Bucket, asked: Bucket | str) -> bool:
    """Return True if a bucket has the name that is asked for, or serves any of the asked row lengths."""
    if isinstance(asked, str):
        return bucket.name == asked
    return (asked.last is None or bucket.first <= asked.last) and (bucket.last is None or asked.first <= bucket.last)


def _misplaced(bucket: Bucket, right: Bucket, before: Bucket | None) -> str:
    if before is None:
        return f"{bucket.name} ({bucket}) is the first bucket and must start at 1; buckets ascend; write {right}"
    between = f"{before.name} ({before}) and {bucket.name} ({bucket})"
    if bucket.first > right.first:
        gap = f"N = {right.first}..{bucket.first - 1}"
        return f"there is a gap between {between}: no bucket serves {gap}; start {bucket.name} at {right.first}"
    if bucket.last is not None and bucket.last < right.first:
        return f"{between} overlap or are out of order; buckets ascend, each starting one past the last"
    return f"{between} overlap: both serve N = {bucket.first}; start {bucket.name} at {right.first}"

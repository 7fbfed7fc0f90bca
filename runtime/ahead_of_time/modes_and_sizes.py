"""The modes and sizes that a deployment names: row lengths of modes of rows, and shapes of GroupNorm's x.

Imports no torch, so that the command line refuses names and sizes at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, product
from math import prod
from typing import Any

from ..call_kinds import FEW, MANY, MOST, ROWS, SOME
from ..codegen.groups import AnyMode, GroupMode, group_modes, mode_named
from ..codegen.model import Mode
from ..codegen.parameters import FAMILIES
from ..errors import ConflictError, IllegalCombinationError, MissingInstanceError, ShapeError
from ..selection import dispatch
from ..selection.table import Entry

# The arguments that have rows.
_OWN_ROWS = [row for row in chain(*[family.parameters for family in FAMILIES]) if not row.kind.is_shared]
ROW_ARGUMENTS = tuple(dict.fromkeys([row.name for row in _OWN_ROWS if row.kind.has_row_stride]))

_WRITTEN = re.compile(r"(\*|[1-9]\d*)((?:x[1-9]\d*)+)/([1-9]\d*)")


@dataclass(frozen=True)
class GroupShape:
    """A shape of x, and its groups.

    Attributes:
        samples: the number of samples; None is any number.
        channels: of x.
        space: the sizes of the dimensions after the channels: none for (B, C).
        groups: the number of groups of a sample.
    """

    samples: int | None
    channels: int
    space: tuple[int, ...]
    groups: int

    @classmethod
    def parse(cls, text: object) -> GroupShape:
        """Parse a shape such as 2x320x64x64/32, or *x320x64x64/32 for any number of samples.

        Raises:
            ShapeError: the text has another form, or the groups do not divide the channels.
        """
        match = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ShapeError(
                f"shapes has {text!r}; it takes x's shape and how many groups a sample has, '2x320x64x64/32' say, or "
                "'*x320x64x64/32' for any number of samples"
            )
        samples, sizes, groups = match[1], [int(size) for size in match[2][1:].split("x")], int(match[3])
        if sizes[0] % groups:
            raise ShapeError(f"shapes has {text!r}, and {groups} groups do not divide {sizes[0]} channels")
        return cls(None if samples == "*" else int(samples), sizes[0], tuple(sizes[1:]), groups)

    def __str__(self) -> str:
        sizes = "x".join(map(str, ("*" if self.samples is None else self.samples, self.channels, *self.space)))
        return f"{sizes}/{self.groups}"

    @property
    def positions(self) -> int:
        """The number of positions of a channel."""
        return prod(self.space)

    @property
    def n(self) -> int:
        """The number of elements of a group."""
        return self.channels // self.groups * self.positions

    def least_groups(self, entry: Entry, asked: Iterable[str]) -> dict[str, int]:
        """Return a number of groups for each class of M that is asked for and that whole samples can make up.

        Raises:
            ConflictError: there is no such class.
        """
        sizes = least_groups(entry, self.groups)
        if self.samples is not None:
            m = self.samples * self.groups
            sizes = {ROWS[entry.size(m)]: m}
        taken = {word: sizes[word] for word in asked if word in sizes}
        if not taken:
            raise ConflictError(
                f"shapes has {str(self)!r}, whose groups in all samples are {' or '.join(sizes)} ({FEW} is up to "
                f"{entry.small_m}, {SOME} up to {entry.some_m}), and rows has {', '.join(asked)} alone; add "
                f"{next(iter(sizes))!r} to it"
            )
        return taken


def least_groups(entry: Entry, groups: int) -> dict[str, int]:
    """Return the fewest groups of whole samples for each class of M; "most" takes the kernels of "many"."""
    sizes = entry.least_rows(groups)
    return sizes | {MOST: sizes.get(MANY, groups)}


def fitting(modes: Collection[GroupMode], shapes: Iterable[GroupShape]) -> Iterator[tuple[GroupMode, GroupShape]]:
    """Yield each shape with the modes that calls of the shape have.

    Raises:
        ConflictError: a shape has no mode.
    """
    for shape in shapes:
        served = [mode for mode in modes if mode.takes(shape.channels, shape.space)]
        if not served:
            other = "without channels_last" if shape.space else "of channels_last"
            raise ConflictError(
                f"shapes has {str(shape)!r}, and modes has {', '.join(mode.name for mode in modes)}; such an x lies as "
                f"modes {other} have it: name one of those"
            )
        yield from ((mode, shape) for mode in served)


# A mode of rows with their length, or GroupNorm's with a shape.
Pair = tuple[Mode, int] | tuple[GroupMode, GroupShape]


def listed(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values of an argument, or refuse an empty argument.

    Raises:
        ConflictError: there are no values.
    """
    items = tuple(values)
    if not items:
        raise ConflictError(f"{name} is empty, which leaves no call to compile for; leave it out, or say something")
    return items


def refuse_others(name: str, words: Iterable[object], known: Collection[str], takes: str = "some of ") -> None:
    """Raise if an argument has a word that is not among the known words.

    Raises:
        ConflictError: there is such a word.
    """
    for word in words:
        if word not in known:
            raise ConflictError(f"{name} has {word!r}; it takes {takes}{', '.join(known)}")


def _lengths(n: Iterable[int]) -> tuple[int, ...]:
    lengths = tuple(n)
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ShapeError(f"n has {length!r}, which is no row length; it takes whole numbers from 1")
    return tuple(dict.fromkeys(lengths))


def pairs_of(n: Iterable[int], modes: Iterable[str | AnyMode] | None, shapes: Iterable[str] = ()) -> list[Pair]:
    """Return modes at row lengths, and GroupNorm's modes at shapes; see `compile_keys`."""
    lengths, sizes = _lengths(n), tuple(dict.fromkeys(map(GroupShape.parse, shapes)))
    if not lengths and not sizes:
        raise ConflictError(
            "n is empty, which leaves no call to compile for; pass row lengths, or shapes of GroupNorm's x"
        )
    if modes is None:
        entries = [(mode_named(entry.mode), entry.serves) for entry in dispatch.loaded()]
        # Only a recording says how many ranks an all-reduce has.
        return pairs_served([pair for pair in entries if not pair[0].reduce.exchanges], lengths, sizes)
    named = _named(listed("modes", modes), bool(lengths), bool(sizes))
    rows = [mode for mode in named if isinstance(mode, Mode)]
    for mode in rows:
        if mode.reduce.exchanges:
            raise ConflictError(
                f"{mode.name} exchanges rows between ranks, whose number no mode says; record the program's calls "
                "instead: NORMFORGE_RECORD=FILE"
            )
    groups = [mode for mode in named if isinstance(mode, GroupMode)]
    for asked, there, what in ((lengths, rows, "n has row lengths"), (sizes, groups, "shapes has those of GroupNorm")):
        if asked and not there:
            raise ConflictError(f"{what}, and modes has none of those; leave it out, or name such modes")
    return [*product(rows, lengths), *fitting(groups, sizes)]


def pairs_served(
    modes: Sequence[tuple[AnyMode, Callable[[int], bool]]],
    lengths: Iterable[int],
    shapes: Iterable[GroupShape],
    where: str = "",
) -> list[Pair]:
    """Pair modes with the lengths and shapes that they serve.

    Raises:
        MissingInstanceError: no mode serves one of the shapes.
    """
    pairs: list[Pair] = [
        (mode, length) for length in lengths for mode, serves in modes if isinstance(mode, Mode) and serves(length)
    ]
    for shape in shapes:
        serving = [mode for mode, serves in modes if isinstance(mode, GroupMode) and serves(shape.n)]
        if not serving:
            raise MissingInstanceError(
                f"no instance of {where or dispatch.loaded().where} is GroupNorm's of groups of {shape.n} elements, "
                f"as {shape} has; name modes, gn_fwd_bf16 say, or leave it out"
            )
        pairs += fitting(serving, [shape])
    return pairs


def _named(modes: Iterable[str | AnyMode], has_lengths: bool, has_shapes: bool) -> tuple[AnyMode, ...]:
    matched: dict[AnyMode, None] = {}
    for mode in modes:
        try:
            named: list[AnyMode] = [mode_named(name) for name in _matching(mode)] if isinstance(mode, str) else [mode]
        except IllegalCombinationError as error:
            near = difflib.get_close_matches(str(mode), chain(*_known()), n=3, cutoff=0.0)
            raise MissingInstanceError(
                f"modes has {mode!r}, and no mode of {dispatch.loaded().where} is called so; the nearest are "
                f"{', '.join(near)}, and normforge list prints instances: a mode and a bucket of row lengths"
            ) from error
        asked = mode if isinstance(mode, str) else mode.name
        # A glob that names both kinds of mode asks for the modes whose sizes were passed.
        if not has_shapes and all(isinstance(each, GroupMode) for each in named):
            raise ConflictError(
                f"modes has {asked!r}, and kernels of GroupNorm depend on channels and positions, which no row length "
                "says; pass x's shape and groups: shapes=['2x320x64x64/32'], or --shape 2x320x64x64/32"
            )
        if not has_lengths and all(isinstance(each, Mode) for each in named):
            raise ConflictError(f"modes has {asked!r}, of rows, and n no length of those; pass n=[4096], or --n 4096")
        matched.update(dict.fromkeys(named))
    return tuple(matched)


def _matching(name: str) -> list[str]:
    """Return the modes that match a name or a glob: modes of the table in use, or else of GroupNorm."""
    for names in _known():
        if matching := [each for each in names if fnmatchcase(each, name)]:
            return matching
    # A mode that the table lacks is generated on demand, or refused, as for a call.
    return [name]


def _known() -> tuple[list[str], list[str]]:
    """Return the modes of the table in use, and the modes of GroupNorm."""
    return list(dict.fromkeys(entry.mode for entry in dispatch.loaded())), [mode.name for mode in group_modes()]

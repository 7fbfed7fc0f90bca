"""Read a manifest, the YAML file that says which instances exist, and expand it into instances."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from yaml.nodes import Node

from .axes import AXES, BOOLEANS, mode_of
from .document import Pair, Section, compose, line_of
from .errors import IllegalCombinationError, ManifestError, NormforgeError
from .groups import AnyMode
from .instance import Bucket, Instance, Tiles
from .ladder import ALL, read_ladder, read_served
from .lazy import cached_property
from .tile_tables import TileTable, tiled_alike, tiles_of
from .tiling import LONGEST_REDUCED, standard_ladder
from .words import unknown

_Words = dict[str, tuple[str, ...]]

# Recordings keep this section for `normforge warmup` and `aot`; no instance follows from it.
_CALLS = "calls"
_SECTIONS = ("buckets", "defaults", "groups")
_N = "n"
_AXIS_NAMES = tuple(axis.name for axis in AXES)
_KEYS = (*_AXIS_NAMES, _N)
_DEFAULTS: _Words = {_N: (ALL,), **{axis.name: (axis.default,) for axis in AXES if axis.default is not None}}


@dataclass(frozen=True)
class Group:
    """A group as read: the words to combine for every axis, and the buckets."""

    section: Section
    name: str
    at: Node
    words: _Words
    buckets: tuple[Bucket, ...]

    @property
    def line(self) -> int:
        """Return the line that the group starts on."""
        return line_of(self.at)


@dataclass(frozen=True)
class Asked:
    """A mode that a manifest asks for, with the group that asks for each instance by ascending bucket.

    All modes of a group share one mapping, unless other groups ask for more of their buckets.
    """

    mode: AnyMode
    groups: Mapping[Bucket, Group]

    def over(self, buckets: Container[Bucket]) -> Asked:
        """Return the mode over those of its buckets that `buckets` contains."""
        return Asked(self.mode, {bucket: group for bucket, group in self.groups.items() if bucket in buckets})


@dataclass(frozen=True)
class Entry:
    """An instance and the group that asked for it."""

    instance: Instance
    group: str
    line: int


@dataclass(frozen=True)
class Manifest:
    """One manifest or several, expanded: modes in the order in which they are asked for, over ascending buckets."""

    path: str
    buckets: tuple[Bucket, ...]
    asked: tuple[Asked, ...]
    tables: Mapping[str, TileTable] | None

    @cached_property
    def instances(self) -> tuple[Instance, ...]:
        """Return the instances; each name occurs once."""
        # Thousands of modes share a few kinds of tiles.
        tiles: dict[Hashable, dict[Bucket, tuple[tuple[str, Tiles], ...]]] = {}
        instances: list[Instance] = []
        for asked in self.asked:
            alike = tiled_alike(asked.mode)
            if alike not in tiles:
                tiles[alike] = {bucket: tiles_of(asked.mode, bucket, self.tables) for bucket in self.buckets}
            instances += [Instance(asked.mode, bucket, tiles[alike][bucket]) for bucket in asked.groups]
        return tuple(instances)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return the instances, each with its group."""
        groups = (group for asked in self.asked for group in asked.groups.values())
        return tuple(
            Entry(instance, group.name, group.line) for instance, group in zip(self.instances, groups, strict=True)
        )


def load(path: Path, tables: Mapping[str, TileTable] | None = None, text: str | None = None) -> Manifest:
    """Read and expand a manifest.

    Args:
        path: the file.
        tables: measured tiles by architecture; None means the generator's own tables.
        text: the file's text, if it is known already.

    Raises:
        ManifestError: the file cannot be used; the message names file, line, group and the fix.
    """
    root = compose(path, text=text)
    top = Section(path)
    if root is None:
        raise ManifestError(f"{path}:1: the manifest is empty; it needs groups, each with a norm and a dtype_in")
    sections = top.mapping(root, f"the sections {', '.join(_SECTIONS)}")
    for name, pair in sections.items():
        if name not in (*_SECTIONS, _CALLS):
            raise top.error(pair.key, unknown("section", name, _SECTIONS))
    if "groups" not in sections:
        raise top.error(root, "there are no groups, so no instances; add groups, each with a norm and a dtype_in")
    buckets = standard_ladder()
    if "buckets" in sections:
        buckets = read_ladder(Section(path, "buckets"), sections["buckets"].value)
    words = _DEFAULTS
    if "defaults" in sections:
        words = words | _read_words(Section(path, "defaults"), sections["defaults"].value, buckets)
    groups = top.mapping(sections["groups"].value, "groups, by name")
    if not groups and _CALLS in sections:
        raise top.error(
            sections["groups"].key,
            "groups is empty: the recorded calls take no instances, but kernels that normforge holds; compile them by "
            "normforge warmup --recorded FILE, or normforge aot --recorded FILE",
        )
    if not groups:
        raise top.error(sections["groups"].key, "groups is empty; add a group with a norm and a dtype_in")
    read = [_read_group(path, name, pair, words, buckets) for name, pair in groups.items()]
    return Manifest(str(path), buckets, _expand(read), tables)


def load_all(paths: Sequence[Path], tables: Mapping[str, TileTable] | None = None) -> Manifest:
    """Read several manifests and expand them to one, which asks once for each instance that any of them asks for.

    Raises:
        ManifestError: as `load`; also if their buckets differ, because a table has one ladder.
    """
    first, *others = [load(path, tables) for path in paths]
    if not others:
        return first
    for other in others:
        if other.buckets != first.buckets:
            raise ManifestError(
                f"{first.path} and {other.path} have different buckets, and a table has one ladder; give both the same "
                "buckets, or generate them into two folders"
            )
    groups: dict[AnyMode, Mapping[Bucket, Group]] = {}
    for asked in (asked for manifest in (first, *others) for asked in manifest.asked):
        # If several groups ask for one instance, keep the first.
        before = groups.get(asked.mode)
        groups[asked.mode] = _merged(asked.groups, before) if before else asked.groups
    path = " and ".join(manifest.path for manifest in (first, *others))
    return Manifest(path, first.buckets, tuple(map(Asked, groups, groups.values())), tables)


def _merged(groups: Mapping[Bucket, Group], others: Mapping[Bucket, Group]) -> Mapping[Bucket, Group]:
    return dict(sorted({**groups, **others}.items(), key=lambda served: served[0].first))


def _read_group(path: Path, name: str, pair: Pair, defaults: _Words, buckets: tuple[Bucket, ...]) -> Group:
    section = Section(path, f"group {name}")
    words = defaults | _read_words(section, pair.value, buckets)
    for axis in AXES:
        if axis.name not in words:
            raise section.error(
                pair.key, f"{axis.name} is missing; add {axis.name}: [{', '.join(axis.words)}] or one of them"
            )
    served = buckets if words[_N] == (ALL,) else tuple(bucket for bucket in buckets if bucket.name in words[_N])
    return Group(section, name, pair.key, words, served)


def _read_words(section: Section, node: Node, buckets: tuple[Bucket, ...]) -> _Words:
    pairs = section.mapping(node, "axes, as axis: value or axis: [value, value]")
    for name, pair in pairs.items():
        if name not in _KEYS:
            raise section.error(pair.key, unknown("axis", name, _KEYS))
    words = {}
    for axis in AXES:
        if axis.name in pairs:
            value = pairs[axis.name].value
            if axis.is_boolean:
                words[axis.name] = section.booleans(value, axis.name, BOOLEANS)
            else:
                words[axis.name] = section.words(value, axis.name, axis.words)
    if _N in pairs:
        words[_N] = read_served(section, pairs[_N].value, _N, buckets)
    return words


def _expand(groups: list[Group]) -> tuple[Asked, ...]:
    modes: dict[AnyMode, Mapping[Bucket, Group]] = {}
    for group in groups:
        own = dict.fromkeys(group.buckets, group)
        for mode in _modes(group):
            _check_length(mode, group)
            others = modes.get(mode)
            if others is None:
                modes[mode] = own
                continue
            for bucket in group.buckets:
                if bucket in others:
                    raise _made_twice(f"{mode.name}_{bucket.name}", others[bucket], group)
            modes[mode] = _merged(own, others)
    return tuple(map(Asked, modes, modes.values()))


def _check_length(mode: AnyMode, group: Group) -> None:
    for bucket in group.buckets:
        if mode.reduce.exchanges and not 0 < (bucket.last or 0) <= LONGEST_REDUCED:
            raise group.section.error(
                group.at,
                f"{mode.name} holds rows in registers, and bucket {bucket.name} has longer ones than "
                f"{LONGEST_REDUCED}; write n: 1..{LONGEST_REDUCED}, or less",
            )


def _modes(group: Group) -> Iterator[AnyMode]:
    for combination in product(*(group.words[axis.name] for axis in AXES)):
        words = dict(zip(_AXIS_NAMES, combination, strict=True))
        try:
            yield mode_of(words)
        except IllegalCombinationError as error:
            crossed = ", ".join(f"{name} {word}" for name, word in words.items() if len(group.words[name]) > 1)
            where = f"among the combinations of its lists is an illegal one ({crossed}): " if crossed else ""
            raise group.section.error(group.at, f"{where}{error}") from error


def _made_twice(name: str, first: Group, second: Group) -> NormforgeError:
    if first is second:
        return second.section.error(second.at, f"{name} is made twice by this group; its lists overlap")
    return second.section.error(
        second.at,
        f"{name} is made here and by group {first.name} on line {first.line}; let only one of the two groups make it",
    )

"""What --list and --count print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .axes import AXES
from .manifest import Entry, Manifest

_SIZES = ("modes", "instances")


def listing(manifest: Manifest) -> str:
    """A line for each instance: its name and what it does."""
    width = max(len(instance.name) for instance in manifest.instances)
    return "\n".join(f"{instance.name:<{width}}  {instance.summary}" for instance in manifest.instances)


def counts(manifest: Manifest) -> str:
    """How many modes and instances there are, by group and by value of each axis."""
    # The one verb that prints tables imports them: generating needs jinja2 and pyyaml alone.
    from tabulate import tabulate

    entries = manifest.entries
    by_group = _counted((entry.group, entry) for entry in entries)
    by_group.append(("total", *_sizes(entries)))
    by_axis = []
    for axis in AXES:
        counted = _counted((axis.word_of(entry.instance.mode), entry) for entry in entries)
        by_axis += [(axis.name, *row) for row in counted]
    buckets = _counted((f"{entry.instance.bucket.name} ({entry.instance.bucket})", entry) for entry in entries)
    by_axis += [("n", *row) for row in buckets]
    tables = (tabulate(by_group, ("group", *_SIZES)), tabulate(by_axis, ("axis", "value", *_SIZES)))
    return "\n\n".join(tables)


def _counted(valued: Iterable[tuple[str, Entry]]) -> list[tuple[str, int, int]]:
    by_value: dict[str, list[Entry]] = {}
    for value, entry in valued:
        by_value.setdefault(value, []).append(entry)
    return [(value, *_sizes(entries)) for value, entries in by_value.items()]


def _sizes(entries: Sequence[Entry]) -> tuple[int, int]:
    return len({entry.instance.mode for entry in entries}), len(entries)

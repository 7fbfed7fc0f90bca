"""What --list and --count print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from .axes import AXES
from .manifest import Manifest

_SIZES = ("modes", "instances")


def listing(manifest: Manifest) -> str:
    """A line for each instance: its name and what it does."""
    width = max(len(instance.name) for instance in manifest.instances)
    return "\n".join(f"{instance.name:<{width}}  {instance.summary}" for instance in manifest.instances)


def counts(manifest: Manifest) -> str:
    """How many modes and instances there are, by group and by value of each axis."""
    # The one verb that prints tables imports them: generating needs jinja2 and pyyaml alone.
    from tabulate import tabulate

    every = manifest.asked
    by_group = _counted(Counter(group.name for group in asked.groups.values()) for asked in every)
    by_group.append(("total", len(every), sum(len(asked.groups) for asked in every)))
    by_axis = []
    for axis in AXES:
        counted = _counted({axis.word_of(asked.mode): len(asked.groups)} for asked in every)
        by_axis += [(axis.name, *row) for row in counted]
    buckets = _counted({f"{bucket.name} ({bucket})": 1 for bucket in asked.groups} for asked in every)
    by_axis += [("n", *row) for row in buckets]
    tables = (tabulate(by_group, ("group", *_SIZES)), tabulate(by_axis, ("axis", "value", *_SIZES)))
    return "\n\n".join(tables)


def _counted(modes: Iterable[Mapping[str, int]]) -> list[tuple[str, int, int]]:
    """By value, the modes that have it and their instances, of a mapping for each mode from values to instances."""
    by_value: dict[str, list[int]] = {}
    for values in modes:
        for value, instances in values.items():
            by_value.setdefault(value, []).append(instances)
    return [(value, len(instances), sum(instances)) for value, instances in by_value.items()]

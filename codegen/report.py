"""The texts that --list and --count print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from .axes import AXES
from .manifest import Manifest

_SIZES = ("modes", "instances")


def listing(manifest: Manifest) -> str:
    """Return one line per instance: its name and what it computes."""
    width = max(len(instance.name) for instance in manifest.instances)
    return "\n".join(f"{instance.name:<{width}}  {instance.summary}" for instance in manifest.instances)


def counts(manifest: Manifest) -> str:
    """Return tables of the numbers of modes and instances, by group and by value of each axis."""
    # Imported by the one verb that prints tables: generating needs only jinja2 and pyyaml.
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
    """Return (value, modes, instances) for each value, given each mode's number of instances by value."""
    by_value: dict[str, list[int]] = {}
    for values in modes:
        for value, instances in values.items():
            by_value.setdefault(value, []).append(instances)
    return [(value, len(instances), sum(instances)) for value, instances in by_value.items()]

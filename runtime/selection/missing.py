"""The message of a miss: the call, the nearest instance, and how to build the missing instance."""

from __future__ import annotations

from contextlib import suppress

from ..codegen import tiling
from ..codegen.axes import AXES, SAME
from ..codegen.groups import AnyMode, mode_named
from ..codegen.instance import Bucket
from ..errors import IllegalCombinationError, MissingInstanceError
from .table import Entry, Table


def missing_instance(mode: AnyMode, n: int, table: Table) -> MissingInstanceError:
    """Return the error for a legal call that a table cannot serve."""
    return MissingInstanceError(
        f"no instance of {table.where} serves {mode.name} with N = {n}, and NORMFORGE_ON_MISS=error forbids "
        f"generating one.\n{_nearest(mode, n, table)}\n"
        f"To build it, add this group to the manifest:\n"
        f"{group(mode, bucket_of(mode, n, table).name)}"
        f"and run: python generate.py (or: normforge generate --manifest FILE --out DIR)"
    )


def group(mode: AnyMode, n: str) -> str:
    """Return the lines of a manifest's group that makes one mode, named after the mode, over the buckets of `n`."""
    defaults = {SAME: mode.dtype_in.value}
    said = [axis for axis in AXES if axis.word_of(mode) != defaults.get(str(axis.default), axis.default)]
    words = [f"    {axis.name}: {axis.word_of(mode)}\n" for axis in said]
    return f"  {mode.name}:\n{''.join(words)}    n: {n}\n"


def bucket_of(mode: AnyMode, n: int, table: Table) -> Bucket:
    """Return the bucket of a mode for rows of n elements; if the mode lacks a bucket, that of a ladder."""
    # A table that serves n in another mode has the manifest's name for the bucket.
    serving = table.find(mode.name, n) or next((entry for entry in table if entry.serves(n)), None)
    if serving is None:
        return next(bucket for bucket in tiling.standard_ladder() if n in bucket)
    return Bucket(serving.bucket, serving.first, serving.last)


def _nearest(mode: AnyMode, n: int, table: Table) -> str:
    modes: dict[str, AnyMode] = {}
    for name in {entry.mode for entry in table}:
        # A folder may hold modes that no call can ask for, and that are near no mode.
        with suppress(IllegalCombinationError):
            modes[name] = mode_named(name)
    entries = [entry for entry in table if entry.mode in modes]
    if not entries:
        return "That table holds no instance at all."
    best = min(entries, key=lambda entry: (len(_differences(mode, modes[entry.mode])), _distance(entry, n)))
    differences = _differences(mode, modes[best.mode])
    if _distance(best, n):
        differences.append(f"n (it serves {best.first}..{best.last or ''}, asked {n})")
    return f"The nearest instance it holds is {best.name}; it differs in {', '.join(differences)}."


def _differences(asked: AnyMode, other: AnyMode) -> list[str]:
    return [
        f"{axis.name} (it has {axis.word_of(other)}, asked {axis.word_of(asked)})"
        for axis in AXES
        if axis.word_of(asked) != axis.word_of(other)
    ]


def _distance(entry: Entry, n: int) -> int:
    return max(entry.first - n, 0 if entry.last is None else n - entry.last, 0)

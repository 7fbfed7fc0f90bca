"""The contents and the file of a recording: a manifest of instances, followed by one line per call."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..call_kinds import CallKind, lines_of, read_line
from ..codegen.errors import NormforgeError
from ..codegen.groups import AnyMode
from ..codegen.instance import Bucket
from ..codegen.tiling import ladder_of, standard_ladder
from ..errors import RecordError
from ..settings import contents, named
from .missing import group

MARKER = "# Recorded by normforge"
_HEAD = f"""{MARKER}: the instances that a program asked for, and its kinds of call. With this file as FILE,
# normforge generate --manifest FILE --out DIR builds the instances (python generate.py does too), and
# normforge warmup --recorded FILE compiles the kernels, or normforge aot --recorded FILE --arch ARCH --out DIR.
"""
_CALLS, _ITEM = "calls:", "  - "


@dataclass(frozen=True)
class Recorded:
    """The instances and the calls of a recorded program.

    Attributes:
        instances: modes with the buckets that served them.
        calls: the kinds of call whose kernels the program launched.
    """

    instances: frozenset[tuple[AnyMode, Bucket]] = frozenset()
    calls: frozenset[CallKind] = frozenset()

    def __or__(self, other: Recorded) -> Recorded:
        return Recorded(self.instances | other.instances, self.calls | other.calls)


def recordings(paths: Iterable[str | os.PathLike[str]]) -> Recorded:
    """Read some recordings and return their union.

    Raises:
        RecordError: a file cannot be read, or is not a recording that keeps calls.
    """
    recorded = Recorded()
    for path in paths:
        absolute = named(path, RecordError)
        try:
            data = contents(absolute)
        except OSError as error:
            raise RecordError(
                f"{absolute} cannot be read ({error.strerror}); record a program into it: NORMFORGE_RECORD={absolute}"
            ) from error
        if not data.startswith(MARKER.encode()):
            raise RecordError(
                f"{absolute} is no recording (it does not start with {MARKER!r}); record a program: "
                "NORMFORGE_RECORD=FILE, or normforge.record(FILE); what a manifest lists is compiled by "
                "--manifest FILE --n N"
            )
        try:
            recorded |= read(absolute, data)
        except ValueError as error:
            raise RecordError(f"{absolute} cannot be read: {error}; {_ANEW}") from error
    return recorded


_ANEW = "remove it, and record anew: NORMFORGE_RECORD=FILE, or normforge.record(FILE)"


def read(path: Path, data: bytes) -> Recorded:
    """Parse the bytes of a recording.

    Raises:
        ValueError: the recording is damaged, or an earlier version wrote it; the message says which.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    head, marker, tail = text.partition(f"\n{_CALLS}")
    try:
        instances = _instances(path, f"{head}\n" if marker else text)
    except NormforgeError as error:
        raise ValueError(str(error)) from error
    if not marker:
        raise ValueError("it was written by a version of normforge that kept instances and no calls")
    calls: set[CallKind] = set()
    first, *lines = tail.split("\n")
    if first.strip() not in ("", "[]"):
        raise ValueError(f"line {head.count(chr(10)) + 2} has more than {_CALLS}")
    for number, line in enumerate(lines, head.count("\n") + 3):
        if line.strip():
            try:
                if not line.startswith(_ITEM):
                    raise ValueError(f"it does not start with {_ITEM!r}")
                calls.update(read_line(line.removeprefix(_ITEM)))
            except ValueError as error:
                raise ValueError(f"line {number} is no call ({error})") from error
    return Recorded(instances, frozenset(calls))


# Parsing 240 instances takes 0.4 s, each time another process has added a call.
@lru_cache(maxsize=2)
def _instances(path: Path, text: str) -> frozenset[tuple[AnyMode, Bucket]]:
    from ..codegen.manifest import load

    return frozenset((instance.mode, instance.bucket) for instance in load(path, {}, text).instances)


def manifest_of(asked: Iterable[tuple[AnyMode, Bucket]], calls: Iterable[CallKind] = ()) -> str:
    """Return a manifest of the instances, followed by the calls, in an order that does not depend on the arguments'.

    The manifest uses the standard ladder, if the standard ladder has all buckets of the instances. If not, the manifest
    defines buckets that end wherever a bucket of an instance ends. Buckets overlap if they come from tables with
    several ladders. An overlapping bucket is split where other buckets start or end, and the same row lengths are
    served.
    """
    served: dict[AnyMode, set[Bucket]] = {}
    for mode, bucket in asked:
        served.setdefault(mode, set()).add(bucket)
    buckets = {bucket for of_mode in served.values() for bucket in of_mode}
    standard = standard_ladder()
    ladder = standard if buckets.issubset(standard) else _ladder(buckets)
    lines = [_HEAD]
    if ladder is not standard:
        lines += ["buckets:\n", *(f"  {bucket.name}: {bucket}\n" for bucket in ladder)]
    lines.append("groups:\n")
    for mode in sorted(served, key=lambda mode: mode.name):
        # The ladder ends wherever a bucket does, so that each part is either wholly within a bucket or outside.
        names = [part.name for part in ladder if any(part.first in bucket for bucket in served[mode])]
        lines.append(group(mode, f"[{', '.join(names)}]"))
    # JSON is valid YAML, and is read a hundred times as fast.
    items = [f"{_ITEM}{line}\n" for line in lines_of(calls)]
    return "".join([*lines, f"{_CALLS}\n" if items else f"{_CALLS} []\n", *items])


def _ladder(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    ends = {end for bucket in buckets for end in (bucket.first - 1, bucket.last) if end}
    return ladder_of((*sorted(ends), None))

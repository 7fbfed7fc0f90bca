"""The instances that a program asks for, written as a manifest that makes exactly those."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from . import dispatch
from .codegen.model import Bucket, Mode
from .codegen.tiling import ladder_of, standard_ladder
from .errors import RecordError
from .missing import bucket_of, group
from .table import Table

logger = logging.getLogger("normforge")

_MARKER = "# Recorded by normforge"
_HEAD = f"""{_MARKER}: the instances that a program asked for. To build them, with this file as FILE:
# python generate.py --manifest FILE --out DIR, or normforge generate --manifest FILE --out DIR
"""


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the instances that calls within ask for, in whichever thread, as a manifest that makes exactly those.

    They are those of the loaded table, those generated on demand, and those missing under NORMFORGE_ON_MISS=error;
    forward and backward. `which` asks for none. The file is replaced whole each time another is asked for, so that a
    program that is killed leaves a valid one. Where none is, nothing is written, since a manifest has at least one
    group, and a warning says so. Recordings may be nested, and each holds all that was asked for within it.

    Args:
        path: the manifest, in a folder that exists; one that an earlier recording wrote is replaced. The environment
            variable NORMFORGE_RECORD names such a file for the whole process.

    Raises:
        RecordError: it cannot be written, or is a file that no recording wrote; on entry, or, should it become so
            later, by the call that asks for another instance.
    """
    recording = _Recording(Path(path).expanduser().resolve())
    with dispatch.observed(recording.note):
        try:
            yield
        finally:
            recording.close()


def record_process() -> None:
    """Record from now on until the process ends, if NORMFORGE_RECORD says where.

    Raises:
        RecordError: see `record`.
    """
    path = os.environ.get("NORMFORGE_RECORD")
    if path:
        whole = ExitStack()
        whole.enter_context(record(path))
        atexit.register(whole.close)


def manifest_of(asked: Iterable[tuple[Mode, Bucket]]) -> str:
    """A manifest of these instances, in an order that does not depend on theirs.

    It is over the standard ladder, if that has all their buckets. If not, it has buckets of its own, which end
    wherever one of theirs does; where some overlap, because they come from tables with several ladders, each is made
    in the parts that others cut it into, and the same row lengths are served.
    """
    served: dict[Mode, set[Bucket]] = {}
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
        # No part of a ladder that ends wherever they do is but partly in one of them.
        names = [part.name for part in ladder if any(part.first in bucket for bucket in served[mode])]
        lines.append(group(mode, f"[{', '.join(names)}]"))
    return "".join(lines)


def _ladder(buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
    ends = {end for bucket in buckets for end in (bucket.first - 1, bucket.last) if end}
    return ladder_of((*sorted(ends), None))


class _Recording:
    """A file, and what has been asked for since it was named."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked: frozenset[tuple[Mode, Bucket]] = frozenset()
        self._lock = threading.Lock()
        try:
            foreign = path.exists() and not _is_recording(path)
            # Whether its folder takes a file is best learned by making one.
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise self._unwritable(error) from error
        if foreign:
            raise RecordError(
                f"{path} is there already and was not written by a recording (it is no file that starts with "
                f"{_MARKER!r}); move it elsewhere, or name another file: NORMFORGE_RECORD=FILE, or "
                "normforge.record(FILE)"
            )

    def note(self, mode: Mode, n: int, table: Table) -> None:
        """Add the instance for rows of n elements, and write the file if it is another one."""
        entry = table.find(mode.name, n)
        bucket = bucket_of(n, table) if entry is None else Bucket(entry.bucket, entry.first, entry.last)
        with self._lock:
            asked = self._asked | {(mode, bucket)}
            if asked != self._asked:
                self._write(manifest_of(asked))
                self._asked = asked

    def close(self) -> None:
        """Warn if there was nothing to write."""
        if not self._asked:
            logger.warning("no instance was asked for, so %s was not written: a manifest needs one", self._path)

    def _write(self, text: str) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            try:
                temporary.write_text(text)
                temporary.replace(self._path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RecordError:
        return RecordError(
            f"the instances that are asked for cannot be recorded to {self._path} ({error.strerror}); make its folder "
            "and see that it can be written, or name another file: NORMFORGE_RECORD=FILE, or normforge.record(FILE)"
        )


def _is_recording(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(_MARKER.encode())

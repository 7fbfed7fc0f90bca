"""Recordings of a running program: a manifest of exactly the instances that the program asked for, and its calls.

The file is a manifest, followed by one line per call.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from pathlib import Path

from .. import settings
from ..call_kinds import CallKind, lines_of, read_line
from ..codegen.errors import NormforgeError
from ..codegen.groups import AnyMode
from ..codegen.instance import Bucket
from ..codegen.locking import locked, replace_file
from ..codegen.tiling import ladder_of, standard_ladder
from ..errors import RecordError
from ..locks import fork_safe
from . import dispatch
from .dispatch import Recorded
from .missing import group

logger = logging.getLogger("normforge")

MARKER = "# Recorded by normforge"
_HEAD = f"""{MARKER}: the instances that a program asked for, and its kinds of call. With this file as FILE,
# normforge generate --manifest FILE --out DIR builds the instances (python generate.py does too), and
# normforge warmup --recorded FILE compiles the kernels, or normforge aot --recorded FILE --arch ARCH --out DIR.
"""
_CALLS, _ITEM = "calls:", "  - "
# Kernels that are no instances of a table can be all that was asked for.
_NO_GROUPS = "groups: {}"


def recordings(paths: Iterable[str | os.PathLike[str]]) -> Recorded:
    """Read some recordings and return their union.

    Raises:
        RecordError: a file cannot be read, or is not a recording that keeps calls.
    """
    recorded = Recorded()
    for path in paths:
        absolute = settings.named(path, RecordError)
        try:
            data = settings.contents(absolute)
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


_FILE = "NORMFORGE_RECORD=FILE, or normforge.record(FILE)"
_ANEW = f"remove it, and record anew: {_FILE}"
_ELSEWHERE = f"or name another file: {_FILE}"


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
        is_bare = head.endswith(f"\n{_NO_GROUPS}")
        instances = frozenset() if is_bare else _instances(path, f"{head}\n" if marker else text)
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
    ends = {end for bucket in buckets for end in (bucket.first - 1, bucket.last) if end}
    ladder = standard if buckets.issubset(standard) else ladder_of((*sorted(ends), None))
    lines = [_HEAD]
    if ladder is not standard:
        lines += ["buckets:\n", *(f"  {bucket.name}: {bucket}\n" for bucket in ladder)]
    lines.append("groups:\n" if served else f"{_NO_GROUPS}\n")
    for mode in sorted(served, key=lambda mode: mode.name):
        # The ladder ends wherever a bucket does, so that each part is either wholly within a bucket or outside.
        names = [part.name for part in ladder if any(part.first in bucket for bucket in served[mode])]
        lines.append(group(mode, f"[{', '.join(names)}]"))
    # JSON is valid YAML, and is read a hundred times as fast.
    items = [f"{_ITEM}{line}\n" for line in lines_of(calls)]
    return "".join([*lines, f"{_CALLS}\n" if items else f"{_CALLS} []\n", *items])


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the instances, as a manifest, and the kinds of call that calls within ask for, in any thread.

    Instances come from the loaded table, are generated on demand, or are missing under NORMFORGE_ON_MISS=error, both
    forward and backward. `which` asks for no instance. `warmup(recorded=FILE)`, `compile_keys` and
    `normforge aot --recorded FILE` compile for the kinds of call, on any GPU. A kind of call holds the mode, row length
    and types, the alignment of row strides and addresses, and the class of M. A kind of call holds no tensor's values,
    address or number of rows.

    An instance or a kind of call is added to the file when first asked for, so that a killed program leaves a valid
    file. A recording keeps the file's earlier contents, from this program, a concurrent program or an earlier program:
    remove the file to begin anew. If nothing is asked for, nothing is written, and a warning says so. Recordings may be
    nested, and each recording holds everything asked for within it.

    Args:
        path: the manifest, in an existing folder: a new file, or a file that an earlier recording wrote. The
            environment variable NORMFORGE_RECORD names a file for the whole process and its child processes; in the
            name, %p means the process's id, %r its RANK, and %% is %. If the file still cannot be written when the
            process ends, the process says so on standard error, and the exit status is 1.

    Raises:
        RecordError: the file cannot be written, no recording wrote the file, or a version that kept no calls did.
            Raised on entry; if the file becomes unusable later, by the call that asks for another kernel; and at the
            end, if the file is still unusable.
    """
    recording = _Recording(settings.named(path, RecordError))
    with dispatch.observed(recording.add):
        try:
            yield
        except BaseException as error:
            recording.close(error)
            raise
        recording.close()


def add(path: str | os.PathLike[str], recorded: Recorded) -> Recorded:
    """Add the contents of other recordings to a recording, created if absent, and return the whole contents.

    Raises:
        RecordError: see `record`.
    """
    return _Recording(settings.named(path, RecordError)).add(recorded)


# A process with both PyTorch and JAX calls this function twice.
@cache
def record_process(path: Path) -> None:
    """Record into the file that NORMFORGE_RECORD names from now until the process ends.

    Raises:
        RecordError: see `record`.
    """
    whole = ExitStack()
    whole.enter_context(record(path))
    atexit.register(_end, whole)


def _end(recording: ExitStack) -> None:
    try:
        recording.close()
    except RecordError as error:
        print(f"normforge: error: {error}", file=sys.stderr)
        # An exception would leave the exit status 0, and the parent process would take the recording for complete.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


class _Recording:
    """A recording's file, and everything asked for since the recording began."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Everything that was asked for, and the part of it that was written.
        self._asked = self._saved = Recorded()
        # The file's text when this process last read the file, and the text's parsed contents.
        self._text = b""
        self._found = Recorded()
        self._lock = fork_safe(threading.Lock())
        with self._writing():
            self._look()
            # Creating a file is the best test that the folder is writable.
            tempfile.TemporaryFile(dir=path.parent).close()

    def add(self, recorded: Recorded) -> Recorded:
        """Add to what was asked for, write the file if anything is new, and return the file's whole contents."""
        with self._lock:
            self._asked |= recorded
            if self._asked != self._saved:
                self._save()
            return self._found

    def close(self, error: BaseException | None = None) -> None:
        """Write whatever could not be written before; warn if there was nothing to write.

        Args:
            error: the exception that ends the recording, if any; a RecordError is then not raised.
        """
        with self._lock:
            if self._asked != self._saved:
                try:
                    self._save()
                except RecordError:
                    if error is None:
                        raise
        if self._asked == Recorded() and not self._path.exists():
            logger.warning("no instance was asked for, so %s was not written: a manifest needs one", self._path)

    def _save(self) -> None:
        """Add what was asked for to the file, which others may add to at the same time."""
        with self._writing(), locked(self._path.with_name(f".{self._path.name}.lock")):
            self._look()
            asked = self._found | self._asked
            text = manifest_of(asked.instances, asked.calls).encode()
            if text != self._text:
                replace_file(self._path, text)
            self._text, self._found, self._saved = text, asked, self._asked

    def _look(self) -> None:
        """Read and parse the file, if the file has changed."""
        try:
            text = settings.contents(self._path) if self._path.is_file() else b""
        except FileNotFoundError:
            text = b""
        is_free = self._path.is_file() or not os.path.lexists(self._path)
        if not (text.startswith(MARKER.encode()) if text else is_free):
            raise RecordError(
                f"{self._path} is there already and was not written by a recording (it is no file that starts with "
                f"{MARKER!r}); move it elsewhere, {_ELSEWHERE}"
            )
        if text == self._text:
            return
        try:
            self._text, self._found = text, read(self._path, text) if text else Recorded()
        except ValueError as error:
            raise RecordError(
                f"{self._path} is there already and cannot be added to: {error}; remove it, {_ELSEWHERE}"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise a RecordError if the file cannot be read or written within."""
        try:
            yield
        except RecordError:
            raise
        except OSError as error:
            raise RecordError(
                f"the instances that are asked for cannot be recorded to {self._path} ({error.strerror}); make its "
                f"folder and see that it can be written, {_ELSEWHERE}"
            ) from error

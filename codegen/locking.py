"""What several processes may want to change at once: one at a time, by a lock, and never half of it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that a file stands for, for which this waits; the system lets go of a killed process's.

    The file is made and removed. A killed process leaves it lying, which does no harm: the next one takes it.

    Args:
        path: the file, which is for this alone, in a folder that is there.

    Raises:
        OSError: it cannot be made or locked.
    """
    handle = _acquire(path)
    try:
        yield
    finally:
        # Removed while it is held, so that whoever waits for it finds that it is another file's by then.
        with suppress(OSError):
            path.unlink()
        _release(handle)


def replace_text(path: Path, text: str) -> None:
    """Give a file, or the one that a link stands for, another text: a reader finds the old one or the new one.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(text.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _acquire(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_at(handle, path):
                return handle
        except BaseException:
            _release(handle)
            raise
        _release(handle)


def _release(handle: int) -> None:
    # A child that was forked meanwhile has the file open as well: closing it here alone would leave it locked.
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False

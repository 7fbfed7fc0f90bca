"""Let several processes change a file: one at a time, under a lock, and never by halves."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file and hold it; the system releases the lock of a killed process.

    The file is created and removed here. A killed process leaves the file behind, which does no harm: the next process
    locks the same file.

    Args:
        path: the lock file, used for nothing else, in an existing folder.

    Raises:
        OSError: the file cannot be created or locked.
    """
    handle = _acquire(path)
    try:
        yield
    finally:
        # Remove the file while holding the lock, so that a waiting process sees that its file is no longer at the path.
        with suppress(OSError):
            path.unlink()
        _release(handle)


def replace_file(path: Path, contents: str | bytes, mode: int = 0o666) -> None:
    """Replace a file atomically: readers find either the old or the new contents.

    Several processes may do this at once. A link at the path is replaced, not followed.

    Args:
        path: the file, in an existing folder.
        contents: bytes, or text that is written in UTF-8.
        mode: the file's permissions, before the umask.

    Raises:
        OSError: the file cannot be written, and is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Another user who may write to the folder could have put a link there.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)
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
    # A child process that was forked meanwhile has the file open too; closing it here would leave it locked.
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False

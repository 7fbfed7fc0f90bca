"""Paths that a program names: absolute from the start, wherever the process goes; and what regular files hold."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import NormforgeError

# An index or a recording of every kernel there is takes some MiB.
_MOST_BYTES = 256 << 20
_ROOT = 0


def named(path: str | os.PathLike[str], error: type[NormforgeError]) -> Path:
    """A path as a call names it, absolute.

    Raises:
        NormforgeError: the given error; there can be no such path.
    """
    try:
        return Path(path).expanduser().resolve()
    except (ValueError, RuntimeError, OSError) as problem:
        # A NUL, an unknown user's home, a link to itself, a working folder that is gone.
        raise error(f"{os.fspath(path)!r} is no path ({problem}); name another") from problem


def contents(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: there is none that can be read, or it is too large to be one of normforge's.
    """
    # Opening a pipe would wait for somebody to write to it.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file")
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(0, f"it is longer than {_MOST_BYTES >> 20} MiB")
    return data


def why_open(path: Path, owned: int) -> str | None:
    """Return why another user could have put code at a path, or None if no user but this one and root could.

    Args:
        path: a file or a folder that exists.
        owned: how many parts of the path, counted from its end, this user or root must own. A folder above them may be
            another user's: whatever that user moves there is the other user's too.
    """
    path = path.parent.resolve() / path.name
    for place, part in enumerate((path, *path.parents)):
        about = part.lstat()
        if stat.S_ISLNK(about.st_mode):
            return f"{part} is a symbolic link"
        if place < owned and about.st_uid not in (os.geteuid(), _ROOT):
            return f"{part} belongs to user {about.st_uid}"
        # Where only a file's owner may rename it, as in /tmp, the rest of the path stays what it was found to be.
        if about.st_mode & stat.S_IWOTH and not (place and about.st_mode & stat.S_ISVTX):
            return f"{part} can be written by everybody (chmod o-w {part} ends that)"
    return None

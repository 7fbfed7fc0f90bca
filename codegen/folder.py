"""An output folder: what a run would change in it, and how that is done so that its table always imports."""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .emit import MARKER
from .errors import FolderError

_TABLE = "dispatch.py"
_MARKER_LINES = 5
_TEMPORARY = ".normforge-tmp"
_NAMES_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """An output folder beside what it should hold; every file is in exactly one of the five lists."""

    folder: Path
    files: Mapping[str, str]
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    stale: tuple[str, ...]
    foreign: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether the folder holds exactly what it should."""
        return not (self.missing or self.changed or self.stale or self.foreign)

    @property
    def foreign_names(self) -> str:
        """The files that are somebody else's, in a phrase that stays short."""
        more = len(self.foreign) - _NAMES_SHOWN
        return ", ".join(self.foreign[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def refuse_foreign(self) -> None:
        """Refuse a folder that holds files of somebody else's.

        Raises:
            FolderError: there are such files; the message lists them.
        """
        if self.foreign:
            raise FolderError(
                f"{self.folder} holds files that normforge did not make: {self.foreign_names}; "
                "nothing was written or removed. Move them elsewhere, or choose another folder with --out"
            )

    def diff(self) -> Iterator[str]:
        """The unified diff from what is on disk to what should be there, line by line."""
        for name in (*self.missing, *self.changed, *self.stale):
            path = str(self.folder / name)
            yield from _unified(
                [] if name in self.missing else _lines(_read(self.folder / name).decode("utf-8", "replace")),
                [] if name in self.stale else _lines(self.files[name]),
                "/dev/null" if name in self.missing else path,
                "/dev/null" if name in self.stale else path,
            )

    def apply(self) -> None:
        """Make the folder hold what it should.

        Everything is first written beside its place, so that a full disk changes nothing. Then modules are put in
        place, then the table that names them, then modules that no table names any more are removed: wherever a
        run is cut off, the folder's table is the old one or the new one, and the modules it names are there.

        Raises:
            FolderError: the folder holds files of somebody else's, or cannot be written.
        """
        self.refuse_foreign()
        token = secrets.token_hex(4)
        table_last = sorted((*self.missing, *self.changed), key=lambda name: name == _TABLE)
        staged = {self.folder / f"{name}.{token}{_TEMPORARY}": name for name in table_last}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for temporary, name in staged.items():
                temporary.write_bytes(self.files[name].encode())
            for temporary, name in staged.items():
                temporary.replace(self.folder / name)
            for name in self.stale:
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise FolderError(
                f"{self.folder} cannot be written: {error.strerror}; mend that and run again, "
                "or choose another folder with --out"
            ) from error
        finally:
            for temporary in staged:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)


def plan(folder: Path, files: Mapping[str, str]) -> Plan:
    """Compare a folder with what it should hold; writes nothing.

    Raises:
        FolderError: the folder cannot be read, or is not a folder.
    """
    present = _list(folder)
    ours, foreign = {}, []
    for name, entry in present.items():
        content = _made_by_us(entry)
        if content is None:
            foreign.append(f"{name}/" if entry.is_dir(follow_symlinks=False) else name)
        else:
            ours[name] = content
    same = {name for name, text in files.items() if ours.get(name) == text.encode()}
    return Plan(
        folder,
        files,
        missing=tuple(name for name in files if name not in present),
        changed=tuple(name for name in files if name in ours and name not in same),
        unchanged=tuple(name for name in files if name in same),
        stale=tuple(sorted(ours.keys() - files.keys())),
        foreign=tuple(sorted(foreign)),
    )


def _list(folder: Path) -> dict[str, os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry for entry in entries if not _is_cache(entry)}
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        raise FolderError(f"{folder} is a file or lies under one; choose a folder with --out") from error
    except OSError as error:
        raise FolderError(f"{folder} cannot be read: {error.strerror}; choose another folder with --out") from error


def _is_cache(entry: os.DirEntry[str]) -> bool:
    return entry.name == "__pycache__" and entry.is_dir(follow_symlinks=False)


def _made_by_us(entry: os.DirEntry[str]) -> bytes | None:
    """The content of a file that normforge made, or None for anything else."""
    if not entry.is_file(follow_symlinks=False):
        return None
    content = _read(Path(entry.path))
    head = content.split(b"\n", _MARKER_LINES)[:_MARKER_LINES]
    # A temporary file is ours whatever it holds: a run that was killed may have left it half written.
    is_ours = entry.name.endswith(_TEMPORARY) or any(MARKER.encode() in line for line in head)
    return content if is_ours else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}; mend that, or choose another --out") from error


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _unified(old: list[str], new: list[str], old_name: str, new_name: str) -> Iterator[str]:
    for line in difflib.unified_diff(old, new, old_name, new_name):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"

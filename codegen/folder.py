"""Compare an output folder with its expected files, and update it so that its table can always be imported."""

from __future__ import annotations

import difflib
import os
import re
import secrets
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .emit import MARKER, Rendered, check_python, render_every_kernel
from .errors import FolderError
from .locking import locked
from .progress import progress

_TABLE = "dispatch.py"
_MARKER_LINES = 5
_TEMPORARY = ".normforge-tmp"
_LOCK = ".normforge-lock"
_KERNEL = re.compile(rb"^def (\w+)\(", re.MULTILINE)
_NAMES_SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """The state of an output folder beside its expected files; each file is in exactly one of the five lists."""

    folder: Path
    files: Mapping[str, str]
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    stale: tuple[str, ...]
    foreign: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Return True if the folder holds exactly the expected files."""
        return not (self.missing or self.changed or self.stale or self.foreign)

    @property
    def foreign_names(self) -> str:
        """Return a short list of the files that normforge did not write."""
        more = len(self.foreign) - _NAMES_SHOWN
        return ", ".join(self.foreign[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def refuse_foreign(self) -> None:
        """Refuse a folder that holds files that normforge did not write.

        Raises:
            FolderError: there are such files; the message lists them.
        """
        if self.foreign:
            raise FolderError(
                f"{self.folder} holds files that normforge did not make: {self.foreign_names}; "
                "nothing was written or removed. Move them elsewhere, or choose another folder with --out"
            )

    def diff(self) -> Iterator[str]:
        """Yield the lines of the unified diff from the files on disk to the expected files."""
        for name in (*self.missing, *self.changed, *self.stale):
            path = str(self.folder / name)
            yield from _unified(
                [] if name in self.missing else _lines(_read(self.folder / name).decode("utf-8", "replace")),
                [] if name in self.stale else _lines(self.files[name]),
                "/dev/null" if name in self.missing else path,
                "/dev/null" if name in self.stale else path,
            )

    def apply(self) -> Plan:
        """Bring the folder up to date, and return the plan that was carried out.

        Runs into one folder wait for each other. All files are first written under temporary names, so that a full disk
        changes nothing. Then modules are replaced, with all kernels that the old table may name; then the table; then
        modules that lose kernels; last, modules that the table no longer names are removed. If a run is interrupted,
        the folder therefore holds either the old table or the new one, and every kernel it names. This holds between
        folders written with one version of the templates; over another version's folder, the table and modules are
        replaced one by one.

        Raises:
            FolderError: the folder holds files that normforge did not write, or cannot be written.
            TemplateError: a file is not Python; nothing is written.
        """
        self.refuse_foreign()
        if self.is_clean:
            return self
        self._check_python()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / _LOCK):
                # Another run may have changed the folder while this run waited for the lock.
                now = plan(self.folder, self.files)
                now.refuse_foreign()
                now._replace()
        except FolderError:
            raise
        except OSError as error:
            raise FolderError(
                f"{self.folder} cannot be written: {error.strerror}; mend that and run again, "
                "or choose another folder with --out"
            ) from error
        return now

    def _check_python(self) -> None:
        shapes: set[Hashable] = set()
        for name in progress((*self.missing, *self.changed), "files checked"):
            text = self.files[name]
            shape = text.shape if isinstance(text, Rendered) else name
            if shape not in shapes:
                check_python(name, text)
                shapes.add(shape)

    def _replace(self) -> None:
        token = secrets.token_hex(4)
        staged: list[tuple[Path, str]] = []

        def stage(name: str, text: str) -> None:
            temporary = self.folder / f"{name}.{len(staged)}.{token}{_TEMPORARY}"
            staged.append((temporary, name))
            temporary.write_bytes(text.encode())

        try:
            losing = {name: text for name in self.changed if (text := self._until_the_table_changes(name)) is not None}
            written = sorted((*self.missing, *self.changed), key=lambda name: name == _TABLE)
            for name in progress(written, "files written"):
                stage(name, losing.get(name, self.files[name]))
            for name in losing:
                stage(name, self.files[name])
            for temporary, name in staged:
                temporary.replace(self.folder / name)
            for name in self.stale:
                (self.folder / name).unlink(missing_ok=True)
        finally:
            for temporary, _ in staged:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def _until_the_table_changes(self, name: str) -> str | None:
        """Return a module that serves the old table and the new one, or None if the new module serves both."""
        kernels = set(_KERNEL.findall(_read(self.folder / name)))
        if kernels <= set(_KERNEL.findall(self.files[name].encode())):
            return None
        return render_every_kernel(name.removesuffix(".py"))


def plan(folder: Path, files: Mapping[str, str]) -> Plan:
    """Compare a folder with its expected files; write nothing.

    Raises:
        FolderError: the folder cannot be read, or is not a folder.
    """
    present = _list(folder)
    ours, others = {}, {}
    for name, entry in progress(present.items(), "files read"):
        try:
            content = _made_by_us(entry)
        except FileNotFoundError:
            # A temporary file of another run, which removed it after the folder was listed.
            continue
        if content is None:
            others[name] = f"{name}/" if entry.is_dir(follow_symlinks=False) else name
        else:
            ours[name] = content
    same = {name for name, text in files.items() if ours.get(name) == text.encode()}
    return Plan(
        folder,
        files,
        missing=tuple(name for name in files if name not in ours and name not in others),
        changed=tuple(name for name in files if name in ours and name not in same),
        unchanged=tuple(name for name in files if name in same),
        stale=tuple(sorted(ours.keys() - files.keys())),
        foreign=tuple(sorted(others.values())),
    )


def _list(folder: Path) -> dict[str, os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry for entry in entries if not _is_passing(entry)}
    except FileNotFoundError:
        return {}
    except NotADirectoryError as error:
        raise FolderError(f"{folder} is a file or lies under one; choose a folder with --out") from error
    except OSError as error:
        raise FolderError(f"{folder} cannot be read: {error.strerror}; choose another folder with --out") from error
    except ValueError as error:
        raise FolderError(f"{str(folder)!r} is no path ({error}); choose a folder with --out") from error


def _is_passing(entry: os.DirEntry[str]) -> bool:
    """Return True if an entry is Python's cache or the lock of a run, both of which are ignored."""
    if entry.name == _LOCK:
        return entry.is_file(follow_symlinks=False)
    return entry.name == "__pycache__" and entry.is_dir(follow_symlinks=False)


def _made_by_us(entry: os.DirEntry[str]) -> bytes | None:
    """Return the content of a file that normforge wrote, or None for any other entry."""
    if not entry.is_file(follow_symlinks=False):
        return None
    content = _read(Path(entry.path))
    head = content.split(b"\n", _MARKER_LINES)[:_MARKER_LINES]
    # A temporary file counts as ours whatever it holds: a killed run may have left it half written.
    is_ours = entry.name.endswith(_TEMPORARY) or any(MARKER.encode() in line for line in head)
    return content if is_ours else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}; mend that, or choose another --out") from error


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _unified(old: list[str], new: list[str], old_name: str, new_name: str) -> Iterator[str]:
    for line in difflib.unified_diff(old, new, old_name, new_name):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"

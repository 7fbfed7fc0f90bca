"""Kernels compiled ahead of time: a folder of binaries, and an index of what each is and what it was made of.

What it holds is loaded without Triton's compiler, and only where it is exactly what that would make: each binary is
held against the architecture, the release of Triton, the kernel's source and the digests that the index has of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import AotError
from ..locks import fork_safe
from ..settings import contents, named
from .gpu import Target
from .key import KernelKey

# The layout of the index; one of another is refused.
FORMAT = 2
INDEX = "index.json"

_DIGEST = re.compile(r"[0-9a-f]{64}")
# What the fields of a row may say: a file's name leads nowhere but into the folder.
_FIELDS = {
    "file": re.compile(r"\w+-[0-9a-f]{16}", re.ASCII),
    "binary": re.compile(r"cubin|hsaco"),
    "binary_sha256": _DIGEST,
    "metadata_sha256": _DIGEST,
    "ptx_sha256": re.compile(rf"(?:{_DIGEST.pattern})?"),
    "source_sha256": _DIGEST,
}

_lock = fork_safe(threading.Lock())
_folder: Folder | None = None


@dataclass(frozen=True)
class Row:
    """One kernel of a folder.

    Attributes:
        key: `KernelKey.portable`.
        file: the name of its files, without what tells them apart: .json for what Triton says of it, and the binary's.
        binary: the end of the binary's name: cubin or hsaco.
        binary_sha256: of the binary.
        metadata_sha256: of what Triton says of it.
        ptx_sha256: of the PTX that the binary was assembled from, which JAX launches; "" where the folder has none.
        source_sha256: of the kernel's source, as `source_digest` has it.
    """

    key: str
    file: str
    binary: str
    binary_sha256: str
    metadata_sha256: str
    ptx_sha256: str
    source_sha256: str

    @property
    def metadata(self) -> str:
        """The name of the file of what Triton says of it."""
        return f"{self.file}.json"

    @property
    def ptx(self) -> str:
        """The name of the file of its PTX."""
        return f"{self.file}.ptx"

    @property
    def loaded(self) -> dict[str, str]:
        """The names of the files that Triton loads, with their digests."""
        return {f"{self.file}.{self.binary}": self.binary_sha256, self.metadata: self.metadata_sha256}

    @property
    def files(self) -> dict[str, str]:
        """The names of all files, with their digests."""
        return {**self.loaded, **({self.ptx: self.ptx_sha256} if self.ptx_sha256 else {})}


@dataclass(frozen=True)
class Folder:
    """A folder of compiled kernels, as its index describes it.

    Attributes:
        path: where it is.
        normforge: the version that made it; another loads it too, as long as the kernels are the same.
        triton: the release of Triton that compiled it.
        arch: what for: "sm_90" or "gfx942", say.
        rows: the kernels, by `KernelKey.portable`.
    """

    path: Path
    normforge: str
    triton: str
    arch: str
    rows: Mapping[str, Row]

    def find(self, key: KernelKey, function: Any, target: Target) -> Any:
        """The compiled kernel of a key, not yet loaded onto a device; None if the folder does not hold it.

        Raises:
            AotError: the folder is for another architecture, or the kernel's files are missing or damaged, or its
                source is not what was compiled.
        """
        row = self._row(key, source_digest(function), target)
        if row is None:
            return None
        for name, digest in row.loaded.items():
            self._verify(name, digest)
        try:
            from triton.compiler import CompiledKernel

            # What Triton makes of a kernel that it finds in its own cache: these files, and a source that is not read.
            return CompiledKernel(key.source(function), {name: str(self.path / name) for name in row.loaded}, "")
        except Exception as error:
            raise AotError(
                f"{self.path} holds {key.symbol} in files that Triton cannot read ({error}); {self._again}"
            ) from error

    def find_ptx(self, key: KernelKey, source_sha256: str, target: Target) -> tuple[str, dict[str, Any]] | None:
        """The PTX of a key and what Triton says of it; None if the folder does not hold the kernel.

        Args:
            key: which compilation.
            source_sha256: `digest_of` the kernel's source.
            target: the GPU.

        Raises:
            AotError: as from `find`, or the folder has no PTX of the kernel.
        """
        row = self._row(key, source_sha256, target)
        if row is None:
            return None
        if not row.ptx_sha256:
            raise AotError(
                f"{self.path} holds {key.symbol} without the PTX that JAX launches; compile it again: "
                f"normforge aot --for jax --arch {self.arch} ... --out {self.path}"
            )
        text, told = self._verify(row.ptx, row.ptx_sha256), self._verify(row.metadata, row.metadata_sha256)
        return text.decode(), json.loads(told)

    def _row(self, key: KernelKey, source_sha256: str, target: Target) -> Row | None:
        """Return the index's row of a key, or None; raise if this GPU cannot run the folder's kernels."""
        if target.arch != self.arch:
            raise AotError(
                f"{self.path} holds kernels for {self.arch}, and this GPU is {target.arch}; compile for it, into "
                f"another folder: normforge aot --arch {target.arch} ... --out DIR, or do without: unset NORMFORGE_AOT"
            )
        row = self.rows.get(key.portable)
        if row is not None and row.source_sha256 != source_sha256:
            raise AotError(
                f"{self.path} holds {key.symbol} compiled from another source than {key.kernel} has now; {self._again}"
            )
        return row

    def holds(self, row: Row) -> bool:
        """Return True if the folder has a kernel's files and their digests are those of the index."""
        try:
            for name, digest in row.files.items():
                self._verify(name, digest)
        except AotError:
            return False
        return True

    def save(self) -> None:
        """Write the index; a reader finds the old one or the new one."""
        about = {"normforge": self.normforge, "triton": self.triton, "arch": self.arch}
        document = {"format": FORMAT, **about, "kernels": [asdict(row) for row in self.rows.values()]}
        write(self.path / INDEX, (json.dumps(document, indent=1) + "\n").encode())

    def _verify(self, name: str, digest: str) -> bytes:
        """The bytes of a file of this digest."""
        try:
            data = contents(self.path / name)
            found = hashlib.sha256(data).hexdigest()
        except OSError as error:
            raise AotError(f"{self.path / name} cannot be read ({error.strerror}); {self._again}") from error
        if found != digest:
            raise AotError(f"{self.path / name} is damaged: it is not what {INDEX} says; {self._again}")
        return data

    @property
    def _again(self) -> str:
        return f"compile it again: normforge aot --arch {self.arch} ... --out {self.path}"


def load_aot(folder: str | os.PathLike[str]) -> None:
    """Take kernels from a folder that `normforge aot` wrote, instead of compiling them, from now on.

    What the folder does not hold is compiled as ever, unless NORMFORGE_FROZEN=1 forbids it. Kernels are read when they
    are first called for, and held against the index then; `normforge.warmup` does it for all of a deployment.

    Args:
        folder: the folder. The environment variable NORMFORGE_AOT names one for the whole process; a relative one is
            held against the folder in which normforge was imported.

    Raises:
        AotError: it holds no index that this version reads, or was compiled by another release of Triton. Calls raise
            it too: for a GPU of another architecture, a damaged file, and a kernel whose source has changed.
    """
    global _folder
    read_folder = checked(read(named(folder, AotError)))
    with _lock:
        _folder = read_folder


def loaded() -> Folder | None:
    """The folder in use: what `load_aot` was given last, or what NORMFORGE_AOT names, or none."""
    global _folder
    with _lock:
        if _folder is None:
            path = settings.compiled_ahead()
            if path is not None:
                _folder = checked(read(path))
        return _folder


def find(key: KernelKey, function: Any, target: Target) -> Any:
    """The compiled kernel of a key from the folder in use; None if there is none, or it does not hold it.

    Raises:
        AotError: see `load_aot`.
    """
    folder = loaded()
    return None if folder is None else folder.find(key, function, target)


def read(path: Path) -> Folder:
    """A folder by its index.

    Raises:
        AotError: there is no index, or none that this version reads.
    """
    make = "make one: normforge aot --arch ARCH --n N --out DIR"
    try:
        document = json.loads(contents(path / INDEX))
    except OSError as error:
        within = sorted(index.parent.name for index in path.glob(f"*/{INDEX}"))
        if within:
            make = f"name the folder in it that is for the GPU: {', '.join(within)}"
        raise AotError(f"{path} holds no compiled kernels: no {INDEX} ({error.strerror}); {make}") from error
    except (ValueError, RecursionError) as error:
        raise AotError(f"{path / INDEX} is damaged ({error}); remove {path} and {make}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is not int or found != FORMAT:
        raise AotError(f"{path} has format {found!r} and this normforge reads {FORMAT}; remove it and {make}")
    try:
        about = {name: _text(document, name) for name in ("normforge", "triton", "arch")}
        rows = [_row(row) for row in document["kernels"]]
    except (KeyError, TypeError, ValueError) as error:
        raise AotError(f"{path / INDEX} is damaged ({error}); remove {path} and {make}") from error
    return Folder(path, **about, rows={row.key: row for row in rows})


def _row(values: Any) -> Row:
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields(Row)}:
        raise ValueError("a kernel has not the fields that one has")
    row = Row(**{name: _text(values, name) for name in values})
    for name, legal in _FIELDS.items():
        if not legal.fullmatch(getattr(row, name)):
            raise ValueError(f"a kernel's {name} is {getattr(row, name)[:80]!r}")
    return row


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def checked(folder: Folder) -> Folder:
    """The folder, which this process's Triton compiled.

    Raises:
        AotError: another release did.
    """
    here = triton_version()
    if folder.triton != here:
        raise AotError(
            f"{folder.path} was compiled by Triton {folder.triton} and this process has {here}, which may launch "
            f"kernels otherwise; compile it again: normforge aot --arch {folder.arch} ... --out {folder.path}, or "
            f"install triton=={folder.triton}"
        )
    return folder


def triton_version() -> str:
    """The release of Triton that is here."""
    import triton

    return str(triton.__version__)


def source_digest(function: Any) -> str:
    """A digest of the module of a `triton.JITFunction`, and of the device functions beside it that it calls."""
    return digest_of(Path(function.fn.__code__.co_filename))


@cache
def digest_of(module: Path) -> str:
    """Return `source_digest` of a module's file."""
    digest = hashlib.sha256(module.read_bytes())
    shared = module.with_name("primitives.py")
    if shared.is_file():
        digest.update(b"\0" + shared.read_bytes())
    return digest.hexdigest()


def write(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_bytes(data)
    partial.replace(path)

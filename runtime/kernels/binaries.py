"""Kernels compiled ahead of time: a folder of binaries, and an index of the binaries and their sources.

Binaries are loaded without Triton's compiler, and only if the compiler would produce exactly these binaries. Each
binary is checked against the index: the architecture, the release of Triton, the kernel's source and the digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from .. import settings
from ..codegen.locking import replace_file
from ..errors import AotError
from ..locks import fork_safe
from .gpu import KernelKey, Target

# The layout of the index; `read` raises for any other layout.
FORMAT = 2
INDEX = "index.json"

Digest = Annotated[str, "[0-9a-f]{64}"]

_lock = fork_safe(threading.Lock())
_folder: Folder | None = None


@dataclass(frozen=True)
class Row:
    """One kernel of a folder. Each field has a pattern of its legal values: a file's name leads out of no folder.

    Attributes:
        key: `KernelKey.portable`.
        file: the name of the kernel's files without the suffix: .json for Triton's metadata, and the binary's suffix.
        binary: the suffix of the binary's name: cubin or hsaco.
        binary_sha256: the digest of the binary.
        metadata_sha256: the digest of Triton's metadata.
        ptx_sha256: the digest of the PTX that the binary was assembled from, which JAX launches; "" if the folder has
            no PTX.
        source_sha256: the digest of the kernel's source, as `source_digest` returns.
    """

    key: Annotated[str, "(?s).*"]
    file: Annotated[str, r"(?a)\w+-[0-9a-f]{16}"]
    binary: Annotated[str, "cubin|hsaco"]
    binary_sha256: Digest
    metadata_sha256: Digest
    ptx_sha256: Annotated[str, "(?:[0-9a-f]{64})?"]
    source_sha256: Digest

    @property
    def files(self) -> dict[str, str]:
        """The names of the files, with the digests: the binary and the metadata, which Triton loads, and the PTX."""
        digests = {self.binary: self.binary_sha256, "json": self.metadata_sha256, "ptx": self.ptx_sha256}
        return {f"{self.file}.{suffix}": digest for suffix, digest in digests.items() if digest}


_LEGAL = {name: hint.__metadata__[0] for name, hint in get_type_hints(Row, include_extras=True).items()}


@dataclass(frozen=True)
class Folder:
    """A folder of compiled kernels, as described by the index.

    Attributes:
        path: the path of the folder.
        normforge: the version of normforge that wrote the folder; other versions can load equal kernels too.
        triton: the release of Triton that compiled the kernels.
        arch: the architecture of the kernels, for example "sm_90" or "gfx942".
        rows: the kernels, by `KernelKey.portable`.
    """

    path: Path
    normforge: str
    triton: str
    arch: str
    rows: Mapping[str, Row]

    def find(self, key: KernelKey, function: Any, target: Target) -> Any:
        """Return the compiled kernel of a key, not yet loaded onto a device; None if the folder lacks the kernel.

        Raises:
            AotError: the folder is for another architecture, the kernel's files are missing or damaged, or the kernel
                was compiled from another source.
        """
        row = self._row(key, source_digest(function), target)
        if row is None:
            return None
        loaded = [f"{row.file}.{suffix}" for suffix in (row.binary, "json")]
        for name in loaded:
            self._verify(name, row.files[name])
        try:
            from triton.compiler import CompiledKernel

            # Triton constructs kernels from its own cache in this way: from the files, and a source that is not read.
            return CompiledKernel(key.source(function), {name: str(self.path / name) for name in loaded}, "")
        except Exception as error:
            raise AotError(
                f"{self.path} holds {key.symbol} in files that Triton cannot read ({error}); {self._again}"
            ) from error

    def find_ptx(self, key: KernelKey, source_sha256: str, target: Target) -> tuple[str, dict[str, Any]] | None:
        """Return the PTX of a key and Triton's metadata; None if the folder lacks the kernel.

        Args:
            key: the compilation.
            source_sha256: the result of `digest_of` for the kernel's source.
            target: the GPU.

        Raises:
            AotError: for the reasons of `find`, or the folder has no PTX of the kernel.
        """
        row = self._row(key, source_sha256, target)
        if row is None:
            return None
        if not row.ptx_sha256:
            raise AotError(
                f"{self.path} holds {key.symbol} without the PTX that JAX launches; compile it again: "
                f"normforge aot --for jax --arch {self.arch} ... --out {self.path}"
            )
        metadata, text = [self._verify(name, row.files[name]) for name in (f"{row.file}.json", f"{row.file}.ptx")]
        return text.decode(), json.loads(metadata)

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
        """Return True if the folder has a kernel's files and the digests match the index."""
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
        replace_file(self.path / INDEX, json.dumps(document, indent=1) + "\n")

    def _verify(self, name: str, digest: str) -> bytes:
        """Return the bytes of a file, and raise if the digest differs."""
        try:
            data = settings.contents(self.path / name)
            actual = hashlib.sha256(data).hexdigest()
        except OSError as error:
            raise AotError(f"{self.path / name} cannot be read ({error.strerror}); {self._again}") from error
        if actual != digest:
            raise AotError(f"{self.path / name} is damaged: it is not what {INDEX} says; {self._again}")
        return data

    @property
    def _again(self) -> str:
        return f"compile it again: normforge aot --arch {self.arch} ... --out {self.path}"


def load_aot(folder: str | os.PathLike[str]) -> None:
    """Load kernels from a folder that `normforge aot` wrote, instead of compiling them, from now on.

    Kernels that the folder lacks are compiled as before, unless NORMFORGE_FROZEN=1 forbids compiling. A kernel is read
    and checked against the index on first use; `normforge.warmup` reads and checks all kernels of a deployment.

    Args:
        folder: the folder. The environment variable NORMFORGE_AOT names a folder for the whole process; a relative path
            starts from the folder in which normforge was imported.

    Raises:
        AotError: the folder holds no index that this version reads, or was compiled by another release of Triton. Calls
            raise AotError too: for a GPU of another architecture, a damaged file, and a kernel whose source has
            changed.
    """
    global _folder
    read_folder = checked(read(settings.named(folder, AotError)))
    with _lock:
        _folder = read_folder


def loaded() -> Folder | None:
    """Return the folder in use: the last folder of `load_aot`, else the folder that NORMFORGE_AOT names, else None."""
    global _folder
    with _lock:
        if _folder is None:
            path = settings.compiled_ahead()
            if path is not None:
                _folder = checked(read(path))
        return _folder


def read(path: Path) -> Folder:
    """Read the index of a folder and return the folder.

    Raises:
        AotError: the folder has no index, or has an index that this version does not read.
    """
    make = "make one: normforge aot --arch ARCH --n N --out DIR"
    try:
        document = json.loads(settings.contents(path / INDEX))
        version = document.get("format") if isinstance(document, dict) else None
        if type(version) is not int or version != FORMAT:
            raise AotError(f"{path} has format {version!r} and this normforge reads {FORMAT}; remove it and {make}")
        about = {name: _text(document, name) for name in ("normforge", "triton", "arch")}
        rows = [_row(row) for row in document["kernels"]]
    except OSError as error:
        # A path that cannot be looked at, as its name is too long, cannot be listed either.
        listed = path.glob(f"*/{INDEX}") if isinstance(error, FileNotFoundError) else ()
        within = sorted(index.parent.name for index in listed)
        make = f"name the folder in it that is for the GPU: {', '.join(within)}" if within else make
        raise AotError(f"{path} holds no compiled kernels: no {INDEX} ({error.strerror}); {make}") from error
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise AotError(f"{path / INDEX} is damaged ({error}); remove {path} and {make}") from error
    return Folder(path, **about, rows={row.key: row for row in rows})


def _row(values: Any) -> Row:
    if not isinstance(values, dict) or values.keys() != _LEGAL.keys():
        raise ValueError("a kernel has not the fields that one has")
    for name, legal in _LEGAL.items():
        if not re.fullmatch(legal, _text(values, name)):
            raise ValueError(f"a kernel's {name} is {values[name][:80]!r}")
    return Row(**values)


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def checked(folder: Folder) -> Folder:
    """Return the folder if this process's release of Triton compiled the folder.

    Raises:
        AotError: another release compiled the folder.
    """
    here = triton_version()
    if folder.triton != here:
        raise AotError(
            f"{folder.path} was compiled by Triton {folder.triton} and this process has {here}, which may launch "
            f"kernels otherwise; {folder._again}, or install triton=={folder.triton}"
        )
    return folder


def triton_version() -> str:
    """Return the installed release of Triton."""
    import triton

    return str(triton.__version__)


def source_digest(function: Any) -> str:
    """Return a digest of the module of a `triton.JITFunction`, and of the device functions beside the module."""
    return digest_of(Path(function.fn.__code__.co_filename))


@cache
def digest_of(module: Path) -> str:
    """Return the `source_digest` of a module's file."""
    digest = hashlib.sha256(module.read_bytes())
    shared = module.with_name("primitives.py")
    if shared.is_file():
        digest.update(b"\0" + shared.read_bytes())
    return digest.hexdigest()

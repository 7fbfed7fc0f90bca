"""Make a folder of kernels compiled ahead of time; `aot` describes the contents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._version import __version__
from ..codegen.locking import replace_file
from ..errors import AotError, CacheError
from ..kernels.binaries import INDEX, Folder, Row, read, source_digest, triton_version
from ..kernels.gpu import Target
from ..kernels.obtain import compile_for
from .compile_keys import CompileKey
from .warmup import for_each

# The names of `_compile`'s files, and of the parts of such files that a killed process may have left.
_OURS = re.compile(r"\.?.+-[0-9a-f]{16}\.(?:cubin|hsaco|json|ptx)(?:\.[0-9a-f]{16})?")


@dataclass(frozen=True)
class Built:
    """The result of a build: how many kernels it compiled, kept and removed."""

    compiled: int
    kept: int
    removed: int


def build(
    keys: Sequence[CompileKey], target: Target, out: Path, *, jobs: int | None, progress: bool, ptx: bool = False
) -> Built:
    """Compile kernels into a folder, which then holds exactly these.

    Kernels that the folder holds already, from the same source and the same release of Triton, are kept; files of other
    kernels are removed. The index is written before files are removed and after all else, so that a reader finds the
    old kernels or the new kernels.

    Args:
        keys: what to compile, for the target.
        target: the GPU that they are for.
        out: a folder of kernels for the target, or an empty one; made if it is not there.
        jobs: threads that compile at once; None is one per core, up to 8.
        progress: whether to show a progress bar on standard error.
        ptx: whether to keep the PTX beside each binary, which is what JAX launches.

    Raises:
        AotError: the folder's index cannot be read, or the folder cannot be written.
        CompileError: Triton refuses a kernel; what the index names is as it was.
        CacheError: Triton cannot write what it compiles.
        FrozenError: a kernel would have to be compiled, and NORMFORGE_FROZEN is 1.
    """
    old = read(out) if (out / INDEX).exists() else None
    known = {} if old is None or old.triton != triton_version() else old.rows

    def row_of(key: CompileKey) -> Row:
        source = source_digest(key.function)
        row = known.get(key.key.portable)
        if old and row and row.source_sha256 == source and (row.ptx_sha256 or not ptx) and old.holds(row):
            return row
        return _compile(key, target, out, source, ptx)

    try:
        out.mkdir(parents=True, exist_ok=True)
        if old is None:
            # An index without kernels marks the folder as normforge's, in case the build is interrupted.
            Folder(out, __version__, triton_version(), target.arch, {}).save()
        rows = for_each(keys, row_of, target, doing=f"compile for {target.arch}", jobs=jobs, progress=progress)
        folder = Folder(out, __version__, triton_version(), target.arch, {row.key: row for row in rows})
        folder.save()
        named = {name for row in rows for name in row.files}
        for path in out.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in named:
                path.unlink()
    except CacheError:
        raise
    except OSError as error:
        raise AotError(f"{out} cannot be written ({error.strerror}); name another folder: --out DIR") from error
    kept = sum(known.get(row.key) is row for row in rows)
    removed = 0 if old is None else len(old.rows.keys() - folder.rows.keys())
    return Built(len(rows) - kept, kept, removed)


def _compile(key: CompileKey, target: Target, out: Path, source: str, ptx: bool) -> Row:
    kernel = compile_for(key.key, key.function, target)
    binary = "cubin" if target.is_nvidia else "hsaco"
    metadata = next(Path(path) for name, path in kernel.metadata_group.items() if name.endswith(".json")).read_bytes()
    text = kernel.asm["ptx"].encode() if ptx else b""
    of_binary, of_metadata, of_ptx = (hashlib.sha256(data).hexdigest() for data in (kernel.asm[binary], metadata, text))
    # Each content has its own name, so that an old index never names a file that was replaced.
    content = hashlib.sha256(" ".join((key.key.portable, of_binary, of_metadata)).encode()).hexdigest()
    name = f"{key.key.symbol}-{content[:16]}"
    row = Row(key.key.portable, name, binary, of_binary, of_metadata, of_ptx if ptx else "", source)
    for file, data in zip(row.files, (kernel.asm[binary], metadata, text), strict=False):
        replace_file(out / file, data)
    return row

"""Compile the kernels of a deployment before the first call, in threads: most of a compilation is in LLVM and ptxas."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from .._version import __version__
from ..codegen.groups import AnyMode
from ..codegen.locking import replace_file
from ..errors import AotError, CacheError, CompileError, ConflictError, NormforgeError
from ..kernels.binaries import INDEX, Folder, Row, read, source_digest, triton_version
from ..kernels.gpu import Target, on_device, target_of
from ..kernels.obtain import compile_for, obtain
from ..upstream import triton_launcher
from .compile_keys import CompileKey, compile_keys, gpu, recorded_keys

T = TypeVar("T")

# 16 kernels took 2.8 s in Triton 3.7, and held Python's lock for 0.8 s: with so many threads some already wait for it.
_MOST_JOBS = 8


def warmup(
    n: Iterable[int] = (),
    modes: Iterable[str | AnyMode] | None = None,
    *,
    recorded: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    device: torch.device | str | int | None = None,
    jobs: int | None = None,
    progress: bool = True,
    **options: Any,
) -> list[CompileKey]:
    """Compile everything that calls of some modes and sizes come to, or recorded ones, and load it onto a GPU.

    Afterwards such calls compile nothing in this process or, because Triton keeps compiled kernels on disk, in another
    process on the same machine; NORMFORGE_FROZEN=1 ensures this. If a folder compiled ahead of time is in use, its
    kernels are loaded instead. Under NORMFORGE_FROZEN=1 nothing is compiled here either: kept kernels are loaded, and a
    missing kernel is an error.

    Args:
        n: row lengths; see `compile_keys`.
        modes: see `compile_keys`.
        recorded: what `normforge.record` or NORMFORGE_RECORD wrote, a file or several, instead of n and modes: the
            kernels of the program that was recorded; see `recorded_keys`. Of options it goes with `rows` alone.
        device: the GPU; None is the current one.
        jobs: threads that compile at once; None is one per core, up to 8.
        progress: whether to show a progress bar on standard error.
        **options: what else `compile_keys` takes, but for arch and multiprocessors: shapes of GroupNorm, and what calls
            bring.

    Returns:
        The keys that were compiled or loaded, as `compile_keys` lists them.

    Raises:
        DeviceError: there is no GPU, or kernels are interpreted.
        CompileError: Triton refuses a kernel.
        FrozenError: a kernel would have to be compiled, and NORMFORGE_FROZEN is 1.
        AotError: the folder of kernels compiled ahead of time does not fit.
        NormforgeError: one of those that `compile_keys` lists, or `recorded_keys`.
    """
    if n != ():
        options["n"] = n
    if modes is not None:
        options["modes"] = modes
    foreign = [name for name in ("arch", "multiprocessors") if name in options]
    if foreign:
        raise ConflictError(f"{foreign[0]} was passed, and warmup compiles for a GPU that is here; see normforge aot")
    if recorded is None:
        keys = compile_keys(device=device, **options)
    else:
        beside = [name for name in options if name != "rows"]
        if beside:
            raise ConflictError(
                f"{beside[0]} was passed beside recorded, and recordings say what calls bring; leave one of them out"
            )
        keys = recorded_keys(recorded, device=device, **options)
    return load(keys, gpu(device), jobs=jobs, progress=progress)


def load(keys: list[CompileKey], device: torch.device, *, jobs: int | None, progress: bool) -> list[CompileKey]:
    """Compile keys for a GPU, unless a kept kernel serves them, load the kernels onto the GPU, and return the keys."""
    target = target_of(device)

    def work(key: CompileKey) -> CompileKey:
        # Each thread has its own current device.
        with on_device(device):
            obtain(key.key, key.function, target, device.index)
        return key

    return for_each(keys, work, target, doing="compile", jobs=jobs, progress=progress)


def for_each(
    keys: Sequence[CompileKey],
    work: Callable[[CompileKey], T],
    target: Target,
    *,
    doing: str,
    jobs: int | None,
    progress: bool,
) -> list[T]:
    """Run `work` on each key in threads and return the results, in the order of the keys.

    Args:
        keys: what to work on.
        work: called in a thread.
        target: the GPU that the keys are for; normforge's library in C is compiled first, for a GPU of NVIDIA's.
        doing: what the progress bar says.
        jobs: threads; None is one per core, up to 8.
        progress: whether to show a bar on standard error.

    Raises:
        ConflictError: jobs is less than 1.
        CompileError: Triton refused a kernel; kernels that have begun are finished, and no more are begun.
        NormforgeError: whatever else `work` raises.
        OSError: `work` could not write a file.
        KeyboardInterrupt: the user pressed Ctrl-C; work that has begun goes on in its threads and is not waited for.
    """
    if jobs is not None and jobs < 1:
        raise ConflictError(f"jobs={jobs} will not do; it takes 1 or more, or None for one a core")
    from tqdm import tqdm

    if target.is_nvidia:
        # This library is no kernel: frozen processes take it from Triton's cache, and this puts it there.
        triton_launcher.library(build=True)

    def compiled(key: CompileKey, tries: int = 3) -> T:
        try:
            return work(key)
        except (NormforgeError, OSError):
            raise
        except Exception as error:
            if tries > 1:
                # Python 3.11 has one count of the depth of syntax trees for all threads, and raises a SystemError where
                # two parse at once (https://github.com/python/cpython/issues/106905): 1 of 25 builds under load.
                return compiled(key, tries - 1)
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise CompileError(
                f"Triton refuses {key}: {type(error).__name__}: {first}; leave that row length or mode out, or give "
                "it another tile: normforge tune"
            ) from error

    pool = ThreadPoolExecutor(jobs or min(os.cpu_count() or 1, _MOST_JOBS))
    with tqdm(total=len(keys), desc=doing, unit="kernel", disable=not progress, dynamic_ncols=True) as bar:
        try:
            futures = [pool.submit(compiled, key) for key in keys]
            for _ in map(Future.result, as_completed(futures)):
                bar.update()
        except BaseException as error:
            # A compilation takes seconds, and Ctrl-C waits for none.
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            raise
        pool.shutdown()
        return [future.result() for future in futures]


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

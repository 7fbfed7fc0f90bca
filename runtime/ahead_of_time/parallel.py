"""Work on many kernels at once, in threads: most of a compilation is outside Python, in LLVM and ptxas."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from ..calls import native
from ..errors import CompileError, ConflictError, NormforgeError
from ..kernels.gpu import Target
from ..upstream import native_launcher
from .compile_keys import CompileKey

T = TypeVar("T")

# 16 kernels took 2.8 s in Triton 3.7, and held Python's lock for 0.8 s: with so many threads some already wait for it.
_MOST_JOBS = 8


def for_each(
    keys: Iterable[CompileKey],
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
        target: the GPU that the keys are for; normforge's libraries for the GPU are compiled first.
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
        # These libraries are no kernels: frozen processes take them from Triton's cache, and this puts them there.
        native_launcher.library(build=True)
        native.library(build=True)

    def compiled(key: CompileKey) -> T:
        try:
            return work(key)
        except (NormforgeError, OSError):
            raise
        except Exception as error:
            first = (str(error).strip().splitlines() or ["no message"])[0]
            raise CompileError(
                f"Triton refuses {key}: {type(error).__name__}: {first}; leave that row length or mode out, or give "
                "it another tile: normforge tune"
            ) from error

    listed = list(keys)
    pool = ThreadPoolExecutor(jobs or min(os.cpu_count() or 1, _MOST_JOBS))
    with tqdm(total=len(listed), desc=doing, unit="kernel", disable=not progress, dynamic_ncols=True) as bar:
        try:
            futures = [pool.submit(compiled, key) for key in listed]
            for done in as_completed(futures):
                done.result()
                bar.update()
        except BaseException as error:
            # A compilation takes seconds, and Ctrl-C waits for none.
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            raise
        pool.shutdown()
        return [future.result() for future in futures]

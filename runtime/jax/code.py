"""The PTX of kernels: from a folder that was compiled ahead of time, or from Triton, if it is installed."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from .. import settings
from ..errors import AotError, CompileError, FrozenError
from ..kernels.binaries import Folder, digest_of, read
from ..kernels.gpu import Target
from ..kernels.key import KernelKey
from ..locks import fork_safe
from ..selection.table import Source
from ..settings import named


@dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
        name: its symbol.
        ptx: what is assembled where it runs.
        warps: warps a program.
        shared: bytes of shared memory.
    """

    name: str
    ptx: str
    warps: int
    shared: int


_lock = fork_safe(threading.RLock())
_folder: Folder | None = None
_codes: dict[tuple[KernelKey, str], Code] = {}


def load_aot(folder: str | os.PathLike[str]) -> None:
    """Take kernels from a folder that `normforge aot --for jax` wrote, instead of compiling them, from now on.

    With all that is called for in it, neither Triton nor torch is imported or has to be installed; what it lacks is
    compiled by Triton, unless NORMFORGE_FROZEN=1 forbids it. PTX is assembled by jaxlib: any release of Triton may have
    compiled it.

    Args:
        folder: the folder. The environment variable NORMFORGE_AOT names one for the whole process.

    Raises:
        AotError: it holds no index that this version reads. Lowering raises it too: for a GPU of another
            architecture, a damaged file, no PTX, and a kernel whose source has changed.
    """
    global _folder
    aot_folder = read(named(folder, AotError))
    with _lock:
        _folder = aot_folder
        _codes.clear()


def code_of(key: KernelKey, source: Source, target: Target) -> Code:
    """Return the compiled kernel of a key.

    Raises:
        AotError: the folder in use does not fit; see `load_aot`.
        FrozenError: it would have to be compiled, and NORMFORGE_FROZEN is 1.
        CompileError: it is in no folder, and Triton is not installed; or it is none that jaxlib can launch.
    """
    with _lock:
        code = _codes.get((key, target.arch))
        if code is None:
            code = _codes[key, target.arch] = _of_folder(key, source, target) or _compiled(key, source, target)
        return code


def _of_folder(key: KernelKey, source: Source, target: Target) -> Code | None:
    """Return the kernel of the folder in use, or None if no folder is in use or the folder lacks the kernel."""
    global _folder
    if _folder is None and (path := settings.compiled_ahead()) is not None:
        _folder = read(path)
    ptx = None if _folder is None else _folder.find_ptx(key, digest_of(source.path), target)
    return None if ptx is None else _checked(key, *ptx)


def _compiled(key: KernelKey, source: Source, target: Target) -> Code:
    again = f"compile it ahead of time: normforge aot --for jax --arch {target.arch} --n {key.n} ... --out DIR"
    where = "in no folder" if _folder is None else f"not in {_folder.path}"
    if find_spec("triton") is None:
        raise CompileError(f"{key} is {where}, and Triton, which compiles it, is not installed; install it, or {again}")
    if settings.frozen():
        raise FrozenError(f"NORMFORGE_FROZEN=1 forbids compiling {key}, which is {where}; {again}")
    from ..kernels.obtain import compile_for

    kernel = compile_for(key, source.load(), target)
    return _checked(key, kernel.asm["ptx"], kernel.metadata._asdict())


def _checked(key: KernelKey, ptx: str, metadata: Mapping[str, Any]) -> Code:
    """Return the kernel, or raise CompileError if jaxlib cannot launch the kernel."""
    for name, plain in (
        ("num_ctas", 1),
        ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
        ("launch_cooperative_grid", False),
        ("launch_pdl", False),
    ):
        if (metadata.get(name) or plain) != plain:
            raise CompileError(
                f"{key} was compiled with {name}={metadata[name]}, which jaxlib cannot launch; compile it again with "
                "another release of Triton, which does not ask for it"
            )
    return Code(str(metadata["name"]), ptx, int(metadata["num_warps"]), int(metadata["shared"]))

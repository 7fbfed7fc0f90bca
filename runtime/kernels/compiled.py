"""Where compiled kernels come from: one for each `KernelKey` and device, made once, whichever thread asks first.

A folder that was compiled ahead of time is asked first, then Triton's cache on disk; then Triton compiles, unless
NORMFORGE_FROZEN forbids it.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import torch

from ..errors import FrozenError, SettingError
from ..upstream import triton_hashes
from . import binaries
from .target import Target

# Triton's words for the types of pointers, by what they point to.
_POINTERS: dict[torch.dtype, str] = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}

# Bytes. Triton compiles a pointer that is a multiple of it into wide loads, which fault on any other.
ALIGNMENT = 16
_ALIGNED = f":{ALIGNMENT}"

LARGEST_I32 = 2**31 - 1
# The largest M that kernels count rows up to as an i32: a loop over rows looks a few rounds beyond the last, and a
# round has up to 8448 rows on an H200.
MOST_ROWS_IN_I32 = 2**31 - 2**20


def pointer_type(dtype: torch.dtype, *, aligned: bool) -> str:
    """Triton's word for a pointer to elements of a type, with ":16" behind it if its address is a multiple of that."""
    return _POINTERS[dtype] + (_ALIGNED if aligned else "")


def integer_type(largest: int) -> str:
    """Triton's word for an integer argument that is at most so large."""
    return "i32" if largest <= LARGEST_I32 else "i64"


def row_count_type(m: int) -> str:
    """Triton's word for the number of rows."""
    return "i32" if m <= MOST_ROWS_IN_I32 else "i64"


@dataclass(frozen=True)
class KernelKey:
    """All that one compilation of a kernel depends on, besides the device it is for.

    Attributes:
        kernel: the module and the symbol, joined by a colon.
        arguments: in the kernel's order: name, and a type in Triton's words, or the value of a compile-time constant
            (None for an absent pointer).
        options: what else the compiler is told: num_warps, of the device's size, and a pipeline's own.
    """

    kernel: str
    arguments: tuple[tuple[str, str | int | None], ...]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in (*self.arguments, *self.options))})"

    @cached_property
    def portable(self) -> str:
        """The key without the package of its module, which may have another name in another process."""
        return str(self).removeprefix(self.kernel.rpartition(".")[0] + "." if "." in self.kernel else "")

    @property
    def symbol(self) -> str:
        """The kernel's own name."""
        return self.kernel.rpartition(":")[2]

    @property
    def n(self) -> int:
        """The row length that it is compiled for."""
        n = dict(self.arguments)["N"]
        assert isinstance(n, int)
        return n

    def source(self, function: Any) -> Any:
        """What Triton's compiler is given: a `triton.compiler.ASTSource` of the `triton.JITFunction` that key names."""
        from triton.compiler import ASTSource

        signature = {name: _type(value) for name, value in self.arguments}
        constants = {(at,): value for at, (_, value) in enumerate(self.arguments) if not isinstance(value, str)}
        aligned = [
            at for at, (_, value) in enumerate(self.arguments) if isinstance(value, str) and value.endswith(_ALIGNED)
        ]
        return ASTSource(function, signature, constants, {(at,): [["tt.divisibility", ALIGNMENT]] for at in aligned})


def _type(value: str | int | None) -> str:
    return value.removesuffix(_ALIGNED) if isinstance(value, str) else "constexpr"


_compiled: dict[tuple[KernelKey, int], Any] = {}
_lock = threading.Lock()
# One for each key and device: several kernels may be compiled at once.
_locks: defaultdict[tuple[KernelKey, int], threading.RLock] = defaultdict(threading.RLock)


def obtain(key: KernelKey, function: Any, target: Target, device: int) -> Any:
    """The compiled kernel of a key on a device, which must be the current one; threads that race get the same one.

    Args:
        key: which compilation.
        function: the `triton.JITFunction` that key names.
        target: the device's.
        device: its index.

    Raises:
        FrozenError: it would have to be compiled, and NORMFORGE_FROZEN is 1.
        AotError: the folder of kernels compiled ahead of time does not fit.
    """
    found = _compiled.get((key, device))
    if found is None:
        with _lock:
            lock = _locks[key, device]
        with lock:
            found = _compiled.get((key, device))
            if found is None:
                found = binaries.find(key, function, target) or compile_for(key, function, target)
                with _lock:
                    _start_driver()
                # Triton loads a kernel when its launcher is first asked for, and has the launcher before it has the
                # kernel: a thread that asked meanwhile would launch nothing.
                _ = found.run
                _compiled[key, device] = found
    return found


def obtained() -> tuple[tuple[KernelKey, int], ...]:
    """Everything compiled so far, with the index of its device."""
    return tuple(_compiled)


def compile_for(key: KernelKey, function: Any, target: Target) -> Any:
    """A kernel from Triton's cache on disk or its compiler, for a GPU that need not be here; it is not loaded.

    Args:
        key: which compilation.
        function: the `triton.JITFunction` that key names.
        target: what to compile for.

    Raises:
        FrozenError: it would have to be compiled, and NORMFORGE_FROZEN is 1.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    triton_hashes.settle(function)
    source = key.source(function)
    if _frozen():
        # Triton asks a source for its intermediate representation only once its cache has turned out to lack it.
        source.make_ir = partial(_refuse, key, target)
    backend, arch = ("cuda", int(target.arch[3:])) if target.is_nvidia else ("hip", target.arch)
    knobs = triton.knobs
    # As Triton's own launch has it.
    options = {
        "debug": function.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    return triton.compile(
        source, target=GPUTarget(backend, arch, target.warp_size), options={**options, **dict(key.options)}
    )


def _frozen() -> bool:
    # Read where something is compiled and nowhere else, so that a program may set it once it has warmed up.
    setting = os.environ.get("NORMFORGE_FROZEN") or "0"
    if setting not in ("0", "1"):
        raise SettingError(f"NORMFORGE_FROZEN={setting!r} is neither 1 (compile nothing) nor 0; set it to one of them")
    return setting == "1"


def _refuse(key: KernelKey, target: Target, *_: Any, **__: Any) -> NoReturn:
    folder = binaries.loaded()
    elsewhere = "" if folder is None else f", and neither does {folder.path}"
    raise FrozenError(
        f"NORMFORGE_FROZEN=1 forbids compiling {key} for {target.arch}, and Triton's cache does not hold it"
        f"{elsewhere}; compile it before with normforge.warmup, `normforge warmup` or `normforge aot` and N = {key.n} "
        "(normforge.compile_keys lists what they compile), or unset NORMFORGE_FROZEN"
    )


def _start_driver() -> None:
    # Triton starts it when it is first asked for, and threads that ask at once would each start one.
    import triton

    _ = triton.runtime.driver.active.utils

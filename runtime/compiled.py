"""Where compiled kernels come from: one for each `KernelKey` and device, made once, whichever thread asks first."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import torch

from .errors import FrozenError, SettingError

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
_DTYPES = {word: dtype for dtype, word in _POINTERS.items()}

# Bytes. Triton compiles a pointer that is a multiple of it into wide loads, which fault on any other.
ALIGNMENT = 16
_ALIGNED = f":{ALIGNMENT}"

LARGEST_I32 = 2**31 - 1

# A number of each type that tells Triton nothing but the type: neither 1 nor a multiple of 16.
_NUMBERS: dict[str, int | float] = {"i32": 7, "i64": 2**40 + 7, "fp32": 0.5}


def pointer_type(dtype: torch.dtype, *, aligned: bool) -> str:
    """Triton's word for a pointer to elements of a type, with ":16" behind it if its address is a multiple of that."""
    return _POINTERS[dtype] + (_ALIGNED if aligned else "")


def integer_type(largest: int) -> str:
    """Triton's word for an integer argument that is at most so large."""
    return "i32" if largest <= LARGEST_I32 else "i64"


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


class _Pointer:
    """A tensor that is not there: as much of one as Triton's compiler looks at."""

    def __init__(self, word: str) -> None:
        pointee, _, alignment = word.partition(":")
        self.dtype = _DTYPES[pointee]
        self._address = ALIGNMENT if alignment else 1

    def data_ptr(self) -> int:
        return self._address

    @staticmethod
    def ptr_range() -> int:
        # AMD's backend shortens offsets into what is smaller than 2 GiB; a later call's tensor may be larger.
        return 2**63 - 1


_compiled: dict[tuple[KernelKey, int], Any] = {}
_lock = threading.RLock()


def obtain(key: KernelKey, function: Any, device: int) -> Any:
    """The compiled kernel of a key on a device, which must be the current one; threads that race get the same one.

    Args:
        key: which compilation.
        function: the `triton.JITFunction` that key names.
        device: the device's index.

    Raises:
        FrozenError: it would have to be compiled, and NORMFORGE_FROZEN is 1.
    """
    found = _compiled.get((key, device))
    if found is None:
        with _lock:
            found = _compiled.get((key, device))
            if found is None:
                _refuse_if_frozen(key, device)
                found = _compiled[key, device] = _compile(key, function)
    return found


def obtained() -> tuple[tuple[KernelKey, int], ...]:
    """Everything compiled so far, with the index of its device."""
    return tuple(_compiled)


def _refuse_if_frozen(key: KernelKey, device: int) -> None:
    # Read where something is compiled and nowhere else, so that a program may set it once it has warmed up.
    setting = os.environ.get("NORMFORGE_FROZEN") or "0"
    if setting not in ("0", "1"):
        raise SettingError(f"NORMFORGE_FROZEN={setting!r} is neither 1 (compile nothing) nor 0; set it to one of them")
    if setting == "1":
        raise FrozenError(
            f"NORMFORGE_FROZEN=1 forbids compiling {key} for device {device}; make such a call once before "
            "NORMFORGE_FROZEN is set, or unset it"
        )


def _compile(key: KernelKey, function: Any) -> Any:
    kernel = function.warmup(*[_argument(value) for _, value in key.arguments], grid=(1,), **dict(key.options))
    # Triton loads a kernel when its launcher is first asked for, and has the launcher before it has the kernel: a
    # thread that asked meanwhile would launch nothing.
    _ = kernel.run
    return kernel


def _argument(value: str | int | None) -> object:
    if not isinstance(value, str):
        return value
    return _Pointer(value) if value.startswith("*") else _NUMBERS[value]

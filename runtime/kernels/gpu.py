"""Targets, the GPU properties that tiles, grids and compilations depend on, and keys of compilations.

A target describes a present device, or an architecture without a device; a CPU means Triton's interpreter. A key is
written in Triton's words.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ..call_kinds import MOST_ROWS_IN_I32
from ..codegen.lazy import cached_property
from ..codegen.tiling import WARP
from ..errors import DeviceError, TargetError

# Functions that take a device import torch, because kernels may be chosen without torch: see `normforge.jax`.
if TYPE_CHECKING:
    import torch

# The interpreter has no multiprocessors. One makes programs few, so that a handful of rows gives each program several.
_INTERPRETED_MULTIPROCESSORS = 1

# The first NVIDIA architecture that converts to fp8 with one rounding.
_FIRST_WITH_FP8 = 89
# The first NVIDIA architecture with programmatic dependent launch.
_FIRST_WITH_PDL = 90


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        arch: the architecture's name in tables of tiles, for example "sm_90" or "gfx942"; "cpu" for the interpreter.
        warp_size: threads per warp; in the interpreter, threads per warp of tiles.
        multiprocessors: the number of multiprocessors.
        compiles: whether kernels are compiled for the GPU, rather than interpreted.
        plainly: whether kernels are launched one after another without further guarantees, as jaxlib does: no kernel
            starts before the previous kernel has ended, and no launch can require that all programs run at once.
    """

    arch: str
    warp_size: int
    multiprocessors: int
    compiles: bool = True
    plainly: bool = False

    @property
    def is_nvidia(self) -> bool:
        """True if NVIDIA made the GPU."""
        return self.arch.startswith("sm_")

    @property
    def converts_to_fp8(self) -> bool:
        """True if the GPU converts to the fp8 formats of NVIDIA's hardware with one rounding."""
        return self._is_from(_FIRST_WITH_FP8)

    @property
    def launches_early(self) -> bool:
        """True if a kernel may start before the previous kernel has ended: programmatic dependent launch."""
        return self._is_from(_FIRST_WITH_PDL) and not self.plainly

    def held_at_once(self, resident: int) -> int:
        """Return the number of programs that are sure to run at once, with some per multiprocessor."""
        if self.plainly:
            return 0
        # The interpreter runs one program after another.
        return self.multiprocessors * resident if self.compiles else 1

    def _is_from(self, first: int) -> bool:
        return self.compiles and self.is_nvidia and int(self.arch[3:]) >= first


# Targets for compiling without a device: A100, L40S, H100 and H200, B200, MI210 and half of an MI250, MI300X.
ARCHITECTURES = {
    target.arch: target
    for target in (
        Target("sm_80", 32, 108),
        Target("sm_89", 32, 142),
        Target("sm_90", 32, 132),
        Target("sm_100", 32, 148),
        Target("gfx90a", 64, 104),
        Target("gfx942", 64, 304),
    )
}
_NAMES = re.compile(r"sm_(?:[89]\d|1\d\d)|gfx\d+[0-9a-f]{2}")


def named_target(arch: str, multiprocessors: int | None = None) -> Target:
    """Return the target for the GPUs of an architecture, which need not be present.

    Args:
        arch: for example "sm_90" or "gfx942".
        multiprocessors: the number of multiprocessors; by default the number in `ARCHITECTURES`.

    Raises:
        TargetError: the architecture does not exist, or its number of multiprocessors is neither known nor passed.
    """
    known = ARCHITECTURES.get(arch)
    if known is None and _NAMES.fullmatch(arch) is None:
        raise TargetError(
            f"arch {arch!r} is no architecture that kernels are compiled for; write one like "
            f"{', '.join(ARCHITECTURES)}, without a letter behind an sm_ number: Triton adds what it needs"
        )
    if known is None:
        if multiprocessors is None:
            raise TargetError(
                f"how many multiprocessors GPUs of {arch} have is not known, and tiles are chosen by it; say it: "
                "multiprocessors=…, or --multiprocessors"
            )
        # GCN and CDNA have warps of 64 threads; RDNA, from gfx10 on, runs 32.
        known = Target(arch, 64 if arch.startswith("gfx9") else 32, multiprocessors)
    if multiprocessors is None:
        return known
    if multiprocessors < 1:
        raise TargetError(f"multiprocessors={multiprocessors} will not do; a GPU has one or more")
    return replace(known, multiprocessors=multiprocessors)


@cache
def target_of(device: torch.device) -> Target:
    """Return the target of a device; a CPU is the target of Triton's interpreter."""
    if device.type == "cpu":
        return Target("cpu", WARP, _INTERPRETED_MULTIPROCESSORS, compiles=False)
    import torch

    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip is not None:
        # The enabled features follow the colon.
        arch = str(properties.gcnArchName).split(":")[0]
    return Target(arch, int(properties.warp_size), int(properties.multi_processor_count), compiles=not interpreting())


@cache
def interpreting() -> bool:
    """Return True if Triton runs kernels in its CPU interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def require_device(x: torch.Tensor) -> None:
    """Raise if no kernel can read a tensor.

    Raises:
        DeviceError: x is not on a GPU, and the interpreter is off.
    """
    if not (x.is_cuda or interpreting()):
        raise DeviceError(
            f"x is on {x.device} and generated kernels run on a GPU; move the tensors to one, or set "
            "TRITON_INTERPRET=1 before the program starts to run them in Triton's (slow) CPU interpreter"
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager within which a device is the current device."""
    import torch

    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return nullcontext()


# Triton's words for pointer types, by the element type: torch's names for types, and JAX's.
POINTERS = {
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "int8": "*i8",
    "uint8": "*u8",
    "int32": "*i32",
    "int64": "*i64",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    # Exponents, which kernels decode.
    "float8_e8m0fnu": "*u8",
}

# Bytes. Triton compiles wide loads for a pointer that is a multiple of 16, and such loads fault on any other pointer.
ALIGNMENT = 16
_ALIGNED = f":{ALIGNMENT}"

LARGEST_I32 = 2**31 - 1


def pointer_type(dtype: object, *, aligned: bool) -> str:
    """Return Triton's word for a pointer to elements of a type, with the suffix ":16" for an aligned address.

    Args:
        dtype: a dtype of torch or numpy, or its name.
        aligned: whether the address is a multiple of 16.
    """
    return POINTERS[str(dtype).removeprefix("torch.")] + (_ALIGNED if aligned else "")


def integer_type(largest: int) -> str:
    """Return Triton's word for an integer argument of at most `largest`."""
    return "i32" if largest <= LARGEST_I32 else "i64"


def row_count_type(m: int) -> str:
    """Return Triton's word for the type of the number of rows."""
    return "i32" if m <= MOST_ROWS_IN_I32 else "i64"


# An argument's type, or its value if the value is a compile-time constant.
Word = str | int | tuple[str, ...] | None


@dataclass(frozen=True)
class KernelKey:
    """Everything that one compilation of a kernel depends on, except the device.

    Attributes:
        kernel: the module and the symbol, joined by a colon.
        arguments: pairs in the order of the kernel's parameters: the name, and Triton's word for the type, the words of
            a tuple's types, or the value of a compile-time constant (None for an absent pointer).
        options: options of the compiler: num_warps, in warps of the device's size, and options of the pipeline.
    """

    kernel: str
    arguments: tuple[tuple[str, Word], ...]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in (*self.arguments, *self.options))})"

    @cached_property
    def portable(self) -> str:
        """Return the key without the module's package, which may have another name in another process."""
        return str(self).removeprefix(self.kernel.rpartition(".")[0] + "." if "." in self.kernel else "")

    @property
    def symbol(self) -> str:
        """The kernel's name."""
        return self.kernel.rpartition(":")[2]

    @property
    def n(self) -> int | None:
        """The row length that the kernel is compiled for; None for GroupNorm's kernels, which serve many lengths."""
        n = dict(self.arguments).get("N")
        assert n is None or isinstance(n, int)
        return n

    def source(self, function: Any) -> Any:
        """Return the `triton.compiler.ASTSource` of the `triton.JITFunction` that the key names."""
        from triton.compiler import ASTSource

        constants = {name: value for name, value in self.arguments if not isinstance(value, (str, tuple))}
        signature: dict[str, Any] = dict(self.arguments) | dict.fromkeys(constants, "constexpr")
        signature |= {name: value.removesuffix(_ALIGNED) for name, value in self.arguments if isinstance(value, str)}
        aligned = [(at,) for at, (_, word) in enumerate(self.arguments) if str(word).endswith(_ALIGNED)]
        return ASTSource(function, signature, constants, {at: [["tt.divisibility", ALIGNMENT]] for at in aligned})

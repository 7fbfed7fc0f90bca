"""The key of one compilation of a kernel, in Triton's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..call_kinds import MOST_ROWS_IN_I32
from ..codegen.lazy import cached_property

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

        signature = {name: _type(value) for name, value in self.arguments}
        constants = {name: value for name, value in self.arguments if not isinstance(value, (str, tuple))}
        aligned = [(at,) for at, (_, word) in enumerate(self.arguments) if str(word).endswith(_ALIGNED)]
        return ASTSource(function, signature, constants, {at: [["tt.divisibility", ALIGNMENT]] for at in aligned})


def _type(value: Word) -> str | tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    return value.removesuffix(_ALIGNED) if isinstance(value, str) else "constexpr"

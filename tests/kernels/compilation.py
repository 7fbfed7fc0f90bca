"""Compiling a generated kernel for a target that need not be here."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

from normforge.codegen.model import DType, Instance, Part
from normforge.kernels import scale_warps


@dataclass(frozen=True)
class Target:
    """A GPU architecture, and whether kernels for it are handed fp8 tensors rather than bytes."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    binary: str
    converts_fp8: bool


TARGETS = (
    Target("sm_80", "cuda", 80, 32, "cubin", converts_fp8=False),
    Target("sm_90", "cuda", 90, 32, "cubin", converts_fp8=True),
    Target("sm_100", "cuda", 100, 32, "cubin", converts_fp8=True),
    Target("gfx942", "hip", "gfx942", 64, "hsaco", converts_fp8=False),
)

_POINTERS = {
    DType.FP16: "*fp16",
    DType.BF16: "*bf16",
    DType.FP32: "*fp32",
    DType.INT8: "*i8",
    DType.FP8_E4M3FN: "*fp8e4nv",
    DType.FP8_E5M2: "*fp8e5",
}
_SCALARS = {"M": "i32", "eps": "fp32", "weight_offset": "fp32"}


def compile_kernel(kernel: Any, instance: Instance, n: int, target: Target, part: Part | None = None) -> Any:
    """Compile a kernel as a launch on that target would, with every pointer and, if N allows, row stride aligned.

    Args:
        kernel: the `triton.JITFunction`.
        instance: what it serves, for its tile and element types.
        n: the row length.
        target: what to compile for.
        part: which kernel of the pipeline, if not the one that carries its name.

    Returns:
        Triton's `CompiledKernel`, its texts and binary in `asm`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    block = instance.tile.block
    if part is not None:
        block *= instance.tile.rows
    constants = {"N": n, "ROWS": instance.tile.rows, "BLOCK": block}
    signature = {name: _type(name, instance, target, constants) for name in kernel.arg_names}
    aligned = [
        (index,)
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (name.endswith("_stride") and n % 16 == 0)
    ]
    source = ASTSource(
        kernel,
        signature,
        {name: value for name, value in constants.items() if name in signature},
        {index: [["tt.divisibility", 16]] for index in aligned},
    )
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        return triton.compile(
            source,
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={"num_warps": scale_warps(instance.tile.warps, target.warp_size)},
        )


def _type(name: str, instance: Instance, target: Target, constants: dict[str, int]) -> str:
    mode = instance.mode
    if name in constants:
        return "constexpr"
    if name.endswith("_stride"):
        return "i32"
    if name in _SCALARS:
        return _SCALARS[name]
    if name == "y_ptr":
        is_fp8 = mode.dtype_out.is_quantised and not mode.dtype_out.is_int
        by_instruction = target.converts_fp8 and mode.dtype_out in _POINTERS
        return "*u8" if is_fp8 and not by_instruction else _POINTERS[mode.dtype_out]
    own = {"x_ptr": mode.dtype_in, "dx_ptr": mode.dtype_in, "dy_ptr": DType.BF16, "y_scale_ptr": mode.scale_dtype}
    return _POINTERS[own.get(name, DType.FP32)]

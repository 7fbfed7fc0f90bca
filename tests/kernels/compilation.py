"""Compiling a generated kernel for a target that need not be here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from normforge.codegen.instance import Instance, Tile
from normforge.codegen.model import Mode
from normforge.codegen.tile_tables import tiles_of
from normforge.codegen.tiling import LOAD_BYTES, WARP, standard_ladder
from normforge.codegen.values import DType, Part, Pipeline
from normforge.kernels.gpu import scale_warps
from normforge.kernels.pipelines import row_of
from normforge.kernels.strides import row_alignment


@dataclass(frozen=True)
class Target:
    """A GPU architecture: whether kernels for it are handed fp8 tensors, not bytes, and may be launched early."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    binary: str
    converts_fp8: bool
    launches_early: bool

    def has(self, part: Pipeline | Part) -> bool:
        """Whether there are kernels of a part: programs that share a row wait for one another in NVIDIA's PTX."""
        return isinstance(part, Part) or part.runs_on(self.name)


TARGETS = (
    Target("sm_80", "cuda", 80, 32, "cubin", converts_fp8=False, launches_early=False),
    Target("sm_90", "cuda", 90, 32, "cubin", converts_fp8=True, launches_early=True),
    Target("sm_100", "cuda", 100, 32, "cubin", converts_fp8=True, launches_early=True),
    Target("gfx942", "hip", "gfx942", 64, "hsaco", converts_fp8=False, launches_early=False),
)

_POINTERS = {
    DType.FP16: "*fp16",
    DType.BF16: "*bf16",
    DType.FP32: "*fp32",
    DType.INT8: "*i8",
    DType.FP8_E4M3FN: "*fp8e4nv",
    DType.FP8_E5M2: "*fp8e5",
}
_OPERANDS = ("weight_ptr", "bias_ptr", "x_bias_ptr", "smooth_scale_ptr", "column_scale_ptr")
_OTHERS = {
    "exchange_ptr": "*i64",
    "dropout_rng_ptr": "*i64",
    "dropout_p": "fp32",
    "static_scale_ptr": "*fp32",
    "global_scale_ptr": "*fp32",
    "scale_ub_ptr": "*fp32",
    "y_scale_row_stride": "i64",
    "y_scale_group_stride": "i64",
    "M": "i32",
    "sample_rows": "i32",
    "groups": "i32",
    "eps": "fp32",
    "weight_offset": "fp32",
}

_REGISTERS = 65536
_MOST_REGISTERS = 255


def register_cap(tile: Tile) -> int:
    """Registers a thread may have if a multiprocessor is to hold as many programs as the tile says."""
    return min(_REGISTERS // (tile.resident * tile.warps * WARP) // 8 * 8, _MOST_REGISTERS)


def instance_of(mode: Mode, n: int) -> Instance:
    """The instance of a mode, over the standard ladder, for rows of n elements."""
    bucket = next(bucket for bucket in standard_ladder() if n in bucket)
    return Instance(mode, bucket, tiles_of(mode, bucket))


@dataclass(frozen=True)
class Usage:
    """What a thread of an NVIDIA binary takes: registers, and bytes of stack and of local memory, where it spills."""

    registers: int
    stack: int
    local: int


def usage(compiled: Any) -> Usage:
    """The resources of a compiled kernel, as cuobjdump reports them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found is not None, report
    return Usage(*map(int, found.groups()))


def compile_kernel(
    kernel: Any,
    instance: Instance,
    n: int,
    target: Target,
    part: Pipeline | Part | None = None,
    tile: Tile | None = None,
    operands: DType = DType.FP32,
    residual: DType = DType.FP32,
) -> Any:
    """Compile a kernel as a launch on that target would, with every pointer aligned, and rows that adjoin.

    Args:
        kernel: the `triton.JITFunction`.
        instance: what it serves, for its tile and element types.
        n: the row length.
        target: what to compile for.
        part: which kernel of the pipeline, if not the one that carries its name.
        tile: how it runs, if not as the instance does with many rows.
        operands: the element type of weight, bias and what else is (N,).
        residual: that of the residual and of the sum that is stored.

    Returns:
        Triton's `CompiledKernel`, its texts and binary in `asm`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tile = tile or instance.tile
    constants = {
        "N": n,
        "ROW_ALIGNMENT": row_alignment(n),
        "ROWS": tile.rows,
        "BLOCK": tile.block * tile.rows if part is Part.ROW_TERMS else tile.block,
        "HELD": tile.held,
        "STAGES": tile.stages,
        "PAIRED": n % 2 == 0,
        "PTX": target.backend == "cuda",
        "PDL": target.launches_early,
        "VECTOR": LOAD_BYTES // instance.mode.dtype_in.itemsize,
    }
    assert isinstance(instance.mode, Mode)
    constants |= row_of(instance.mode, tile.pipeline).constants(tile, n)
    others = {"residual_ptr": residual, "residual_out_ptr": residual}
    signature = {name: _type(name, instance, target, constants, operands, others) for name in kernel.arg_names}
    pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        {name: value for name, value in constants.items() if name in signature},
        {(index,): [["tt.divisibility", 16]] for index in pointers},
    )
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        return triton.compile(
            source,
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={"num_warps": scale_warps(tile.warps, target.warp_size)}
            | ({"maxnreg": register_cap(tile)} if target.backend == "cuda" else {}),
        )


def _type(
    name: str,
    instance: Instance,
    target: Target,
    constants: dict[str, int],
    operands: DType,
    others: dict[str, DType],
) -> str:
    mode = instance.mode
    assert isinstance(mode, Mode)
    if name in constants:
        return "constexpr"
    if name.endswith("_stride"):
        return "i32"
    if name in _OTHERS:
        return _OTHERS[name]
    if name in ("x_ptr", "y_ptr"):
        dtype = mode.dtype_in if name == "x_ptr" else mode.dtype_out
        by_instruction = target.converts_fp8 and dtype in _POINTERS
        return "*u8" if (dtype.is_fp8 or dtype.is_fp4) and not by_instruction else _POINTERS[dtype]
    if name in _OPERANDS:
        return _POINTERS[operands]
    if name == "y_scale_ptr" and mode.scale_format.stores_bytes:
        return "*u8"
    own = {
        **others,
        "unquantised_ptr": mode.dtype_in,
        "dx_ptr": mode.dtype_in,
        "ddropped_ptr": mode.dtype_in,
        "dy_ptr": DType.BF16,
        "y_scale_ptr": mode.scale_dtype,
    }
    return _POINTERS[own.get(name, DType.FP32)]

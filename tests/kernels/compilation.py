"""Compiling the kernel of a launch for a target that need not be here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

import normforge
from normforge.ahead_of_time.compile_keys import CompileKey
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.tiling import WARP
from normforge.codegen.values import Part, Pipeline
from normforge.kernels.gpu import Target, named_target
from normforge.kernels.obtain import compile_for
from normforge.selection import dispatch, on_demand
from normforge.selection.table import RetiledTable

from ..folders import instance

TARGETS = tuple(map(named_target, ("sm_80", "sm_90", "sm_100", "gfx942")))
NVIDIA = tuple(target for target in TARGETS if target.is_nvidia)
SM_90 = TARGETS[1]

_REGISTERS = 65536
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class Usage:
    """What a thread of an NVIDIA binary takes: registers, and bytes of stack and of local memory, where it spills."""

    registers: int
    stack: int
    local: int

    def assert_fits(self, tile: Tile, most_stack: int = 0) -> None:
        """Fail unless a multiprocessor holds as many programs as the tile says, and next to nothing is spilled."""
        assert self.registers <= min(_REGISTERS // (tile.resident * tile.warps * WARP) // 8 * 8, _MOST_REGISTERS)
        assert self.local == 0
        assert self.stack <= most_stack


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


def binary_of(target: Target) -> str:
    """The name of what Triton compiles for a target."""
    return "cubin" if target.is_nvidia else "hsaco"


def keys_of(
    mode: Mode,
    n: int,
    target: Target = SM_90,
    tile: Tile | None = None,
    operands: torch.dtype = torch.float32,
    residual: torch.dtype = torch.float32,
) -> list[CompileKey]:
    """The kernels of a call of many rows, all tensors of which are aligned, and whose rows adjoin.

    Args:
        mode: what is computed.
        n: the row length.
        target: what to compile for.
        tile: how it runs, if not as the rule for any architecture says.
        operands: the element type of weight and bias.
        residual: that of the residual and of the sum that is stored.
    """
    tile = tile or instance(mode, n).tile
    types: dict[str, Any] = {"weight_dtypes": [operands], "residual_dtypes": [residual], "dy_dtypes": [torch.bfloat16]}
    entry = dispatch.find(mode, n)
    if tile.pipeline is Pipeline.SPREAD:
        # Committed modules have this kernel where a measured table takes it; a module that is generated now has all.
        entry = on_demand.generate(mode, n, dispatch.loaded().where)
    with dispatch.using(RetiledTable(dispatch.loaded(), entry, tile)):
        return normforge.compile_keys([n], [mode], arch=target.arch, rows=["many"], **types)


def compiled(
    mode: Mode,
    n: int,
    target: Target = SM_90,
    tile: Tile | None = None,
    part: Pipeline | Part | None = None,
    **types: torch.dtype,
) -> Any:
    """Compile one of the kernels of `keys_of`: a part, or the kernel that carries its pipeline's name.

    Returns:
        Triton's `CompiledKernel`, its texts and binary in `asm`.
    """
    symbol = mode.kernel(part or (tile or instance(mode, n).tile).pipeline)
    (key,) = [key for key in keys_of(mode, n, target, tile, **types) if key.key.symbol == symbol]
    return compile_for(key.key, key.function, target)

"""What a checked forward call comes to: the kernels that serve it, made ready, and the outputs that it allocates."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from ..codegen.model import DType
from ..dtypes import TORCH_DTYPES
from ..kernels import pipelines
from ..kernels.gpu import Target, target_of
from ..kernels.key import MOST_ROWS_IN_I32, pointer_type, row_count_type
from ..kernels.launcher import Launcher
from ..kernels.pipelines import row_alignment
from ..kernels.tile_choice import choose, takes_window, window_tile
from ..selection import dispatch
from ..upstream.torch_allocator import allocator
from ..upstream.triton_launcher import Grid, Launch
from .arguments import Call, row_stride
from .overlap import REPLACEABLE, Extent, Extents

# The pointers that a call brings, and those it allocates or is given to write to, in the order of the slots.
INPUTS = ("x_ptr", "x_bias_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "smooth_scale_ptr")
OUTPUTS = ("y_ptr", "residual_out_ptr", "y_scale_ptr", "mean_ptr", "rstd_ptr")


class Prepared(NamedTuple):
    """A kernel that is ready, and how many programs of it, with what memory, a launch takes.

    Attributes:
        launcher: the kernel.
        grid: from M to the programs in each dimension.
        exchange: from M to how many int64 a launch needs besides its operands, or None.
        launch: the launcher's `launch`.
        launch_plain: likewise, if it needs but operands, and writes but y and the rows' statistics.
    """

    launcher: Launcher
    grid: Callable[[int], Grid]
    exchange: Callable[[int], int] | None
    launch: Launch | None
    launch_plain: Launch | None


class Plan:
    """All that launches of one kind of call share, whatever their M. It holds none of a call's tensors.

    Attributes:
        n: row length.
        empty: makes tensors on the device.
        y_dtype: y's.
        y_bytes: whether kernels are handed y as bytes.
        sum_dtype: residual_out's; None where the sum is not stored.
        scale_dtype: y_scale's; None where nothing is quantised.
        saves_mean: whether the rows' means are an output.
        saves_rstd: whether their rstd is.
        extents: where its tensors lie, for `may_write`.
    """

    def __init__(self, call: Call, misaligned: Collection[str], target: Target | None = None) -> None:
        """Find the instance that serves a call.

        Args:
            call: what was asked.
            misaligned: which of `INPUTS` and `OUTPUTS` are at no multiple of 16 bytes.
            target: the GPU that the call is for, if x, which then stands for another tensor, is not on it: kernels are
                known then, and not compiled. None is x's device.

        Raises:
            MissingInstanceError: nothing serves the call and nothing may be generated.
        """
        mode, n = call.mode, call.n
        self._entry = dispatch.find(mode, n)
        self.n = n
        self._target = target or target_of(call.x.device)
        self._launches_on = call.x.device if target is None else None
        # By class of M: for a few rows, for many, and for more than an i32 counts.
        self._prepared: list[Prepared | None] = [None, None, None]

        self.saves_rstd = mode.save_mv
        self.saves_mean = mode.save_mv and mode.norm.centres
        self.y_bytes = _encodes_in_software(mode.dtype_out, self._target)
        self.empty = allocator(call.x.device)
        self.y_dtype = TORCH_DTYPES[mode.dtype_out]
        self.sum_dtype = call.residual.dtype if mode.fadd.stores and call.residual is not None else None
        self.scale_dtype = TORCH_DTYPES[mode.scale_dtype] if mode.fquant.quantises else None

        self._strides = {
            "x_row_stride": call.x_row_stride,
            "residual_row_stride": call.residual_row_stride,
            "y_row_stride": n if call.out is None else row_stride("out", call.out),
            "residual_out_row_stride": _sum_row_stride(call),
        }
        self._mode, self._misaligned = mode, misaligned
        self._types = _types(call, self, misaligned)
        self.extents = Extents(
            inputs=_extents(call, self._strides),
            y=_extent(n, self.y_dtype, self._strides["y_row_stride"]),
            total=_extent(n, self.sum_dtype or self.y_dtype, self._strides["residual_out_row_stride"]),
        )

    def prepared(self, m: int) -> Prepared:
        """The kernel for m rows; the first call of each class of M compiles it."""
        size = 0 if m <= self._entry.small_m else 1 if m <= MOST_ROWS_IN_I32 else 2
        return self._prepared[size] or self._prepare(size, m)

    def _prepare(self, size: int, m: int) -> Prepared:
        tile = choose(self._mode, self._entry.choices(m, self._target.arch), self.n, self._target)
        rule, strides = pipelines.FORWARD[tile.pipeline], self._strides
        if takes_window(self._mode, tile, self.n, strides, self._misaligned):
            rule, strides = pipelines.WINDOW, {"row_stride": strides["x_row_stride"]}
            tile = window_tile(self._mode, tile, self.n, few=size == 0)
        (step,) = rule.steps
        exchange = None if rule.exchange is None else rule.exchange(tile, self.n)
        types = {
            **self._types,
            "exchange_ptr": None if exchange is None else pointer_type(torch.int64, aligned=True),
            "M": row_count_type(m),
            "eps": "fp32",
            "weight_offset": "fp32",
        }
        constants = {
            **pipelines.constants(tile, self.n, row_alignment(*self._strides.values()), self._misaligned, self._target),
            **rule.constants(tile, self.n),
        }
        options = pipelines.compiler_options(rule.options, tile, self._target)
        kernel = self._entry.load(step.part or tile.pipeline)
        launcher = Launcher(kernel, types, strides, constants, tile.warps, options, self._target, self._launches_on)
        is_plain = self.sum_dtype is None and self.scale_dtype is None and exchange is None
        launch_plain = launcher.launch if is_plain else None
        found = Prepared(launcher, step.grid(tile, self.n, self._target), exchange, launcher.launch, launch_plain)
        self._prepared[size] = found
        return found


def _extents(call: Call, strides: dict[str, int]) -> tuple[tuple[int, int, int, bool], ...]:
    tensors = (call.x, call.x_bias, call.residual, call.weight, call.bias, call.smooth_scale)
    return tuple(
        (
            place,
            *_extent(call.n, tensor.dtype, strides.get(f"{name}_row_stride", 0)),
            name in REPLACEABLE,
        )
        for place, (name, tensor) in enumerate(zip(map(_name, INPUTS), tensors, strict=True))
        if tensor is not None
    )


def _name(pointer: str) -> str:
    return pointer.removesuffix("_ptr")


def _extent(n: int, dtype: torch.dtype, row_stride: int) -> Extent:
    return Extent(n * dtype.itemsize, row_stride * dtype.itemsize)


def _sum_row_stride(call: Call) -> int:
    if not call.mode.fadd.stores:
        return 0
    return call.n if call.residual_out is None else row_stride("residual_out", call.residual_out)


def _types(call: Call, plan: Plan, misaligned: Collection[str]) -> dict[str, str | None]:
    """The types of the pointers, in Triton's words."""
    tensors = (call.x, call.x_bias, call.residual, call.weight, call.bias, call.smooth_scale)
    dtypes = {name: None if tensor is None else tensor.dtype for name, tensor in zip(INPUTS, tensors, strict=True)}
    dtypes |= {
        "y_ptr": torch.uint8 if plan.y_bytes else plan.y_dtype,
        "residual_out_ptr": plan.sum_dtype,
        "y_scale_ptr": plan.scale_dtype,
        "mean_ptr": torch.float32 if plan.saves_mean else None,
        "rstd_ptr": torch.float32 if plan.saves_rstd else None,
    }
    return {
        name: None if dtype is None else pointer_type(dtype, aligned=name not in misaligned)
        for name, dtype in dtypes.items()
    }


# Formats that NVIDIA hardware of compute capability 8.9 and up converts to in one rounding. Everywhere else, and in
# the interpreter, kernels are handed bytes and encode in integer arithmetic.
_HARDWARE_FP8 = (DType.FP8_E4M3FN, DType.FP8_E5M2)


def _encodes_in_software(dtype: DType, target: Target) -> bool:
    if not dtype.is_quantised or dtype.is_int:
        return False
    return not (dtype in _HARDWARE_FP8 and target.converts_to_fp8)

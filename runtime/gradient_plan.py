"""What a checked backward call comes to: the kernels that serve it, made ready, and the memory that they need."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from . import dispatch, rules
from .architecture import architecture
from .arguments import row_stride
from .codegen.model import Direction, FusedAdd, Mode, Norm
from .compiled import LARGEST_I32, integer_type, pointer_type
from .direct import Grid, Launch
from .dtypes import DTYPES
from .gradient_arguments import GradientCall
from .kernels import row_alignment
from .launcher import Launcher
from .table import Tile

# The pointers that a call brings, in the order in which launches do.
INPUTS = ("dy_ptr", "x_ptr", "x_bias_ptr", "weight_ptr", "mean_ptr", "rstd_ptr", "dresidual_out_ptr")
SUMS = ("dweight", "dbias", "dx_bias")

# Of partial sums: rows at a time and columns a program, 16 values a thread on 4 warps.
_FINAL_ROWS, _FINAL_BLOCK, _FINAL_WARPS = 16, 128, 4


@dataclass(frozen=True)
class Step:
    """How a kernel is launched, and its grid from M and the number of programs that share the rows."""

    launch: Launch
    grid: Callable[[int, int], Grid]


@dataclass(frozen=True)
class Prepared:
    """The kernels for one class of M.

    Attributes:
        steps: the kernels that walk the rows, in order.
        finish: launches what adds up their partial sums; None where no sum is wanted.
        finish_grid: its programs.
        rows: rows that a program takes at a time.
        most_programs: how many share the rows, where there are as many tiles of rows.
        row_terms: how many values a row the first step leaves for the next: `rules.Backward.row_terms`.
        exchange: from M to how many int64 the programs exchange values through; None where they do not.
        by_address: whether launches take addresses.
    """

    steps: tuple[Step, ...]
    finish: Launch | None
    finish_grid: Grid
    rows: int
    most_programs: int
    row_terms: int
    exchange: Callable[[int], int] | None
    by_address: bool


class GradientPlan:
    """All that backward calls of one kind share, whatever their M. It holds none of a call's tensors.

    Attributes:
        n: row length.
        dx_dtype: dx's; None where it is not wanted.
        dx_alike: whether dx has x's type, and x no gaps between rows.
        dbias_like: an empty tensor of dbias's type and device, to make others from; None where it is not wanted.
        sums: which of `SUMS` are wanted.
        places: of each of `SUMS`, how many others lie before its partial sums; None where it is not wanted.
        count: how many of them.
        fp32_like: an empty fp32 tensor on the device.
        exchange_like: an empty int64 one.
    """

    def __init__(self, call: GradientCall, misaligned: Collection[str]) -> None:
        """Find the instance that serves a call whose dy is there.

        Args:
            call: what was asked.
            misaligned: which of `INPUTS` are at no multiple of 16 bytes.

        Raises:
            MissingInstanceError: nothing serves the call and nothing may be generated.
        """
        assert call.dy is not None
        x, weight, n, wants = call.x, call.weight, call.n, call.wants
        self.n, self._device = n, x.device
        fadd = FusedAdd.NONE if call.dresidual_out is None else FusedAdd.PRE_ADD_STORE
        self._mode = mode_of(call.norm, x, call.x_bias is not None, fadd)
        self._entry = dispatch.find(self._mode, n)
        self._prepared: list[Prepared | None] = [None, None, None]

        self.dx_dtype = (call.dx_dtype or x.dtype) if "dx" in wants else None
        self.dx_alike = self.dx_dtype == x.dtype and x.is_contiguous()
        bias_dtype = call.bias_dtype or (x if weight is None else weight).dtype
        self.dbias_like = torch.empty(0, dtype=bias_dtype, device=x.device) if "dbias" in wants else None
        self.sums = tuple(name in wants for name in SUMS)
        self.places = tuple(sum(self.sums[:place]) if wanted else None for place, wanted in enumerate(self.sums))
        self.count = sum(self.sums)
        self.exchange_like = torch.empty(0, dtype=torch.int64, device=x.device)
        self.fp32_like = torch.empty(0, dtype=torch.float32, device=x.device)

        self._strides = {
            "dy_row_stride": row_stride("dy", call.dy),
            "x_row_stride": row_stride("x", x),
            "dresidual_out_row_stride": (
                0 if call.dresidual_out is None else row_stride("dresidual_out", call.dresidual_out)
            ),
            "dx_row_stride": n,
        }
        centred = torch.float32 if call.norm.centres else None
        given = (call.dy, x, call.x_bias, weight)
        dtypes = [None if tensor is None else tensor.dtype for tensor in given]
        dtypes += [centred, torch.float32, None if call.dresidual_out is None else call.dresidual_out.dtype]
        self._inputs = {
            name: None if dtype is None else pointer_type(dtype, aligned=name not in misaligned)
            for name, dtype in zip(INPUTS, dtypes, strict=True)
        }
        sums = (
            None if weight is None else weight.dtype,
            bias_dtype,
            None if call.x_bias is None else call.x_bias.dtype,
        )
        self._sums = [dtype if wanted else None for dtype, wanted in zip(sums, self.sums, strict=True)]

    def prepared(self, m: int) -> Prepared:
        """The kernels for m rows; the first call of each class of M compiles them."""
        size = 0 if m <= self._entry.small_m else 1 if m <= LARGEST_I32 else 2
        return self._prepared[size] or self._prepare(size, m)

    def _prepare(self, size: int, m: int) -> Prepared:
        entry, n, device = self._entry, self.n, self._device
        tile = rules.choose(self._mode, entry.choices(m, architecture(device)), n, device)
        rule = rules.BACKWARD[tile.pipeline]
        launchers = [self._launcher(step, rule, tile, m) for step in rule.steps]
        grids = [step.grid(tile, n) for step in rule.steps]
        finisher = self._finisher() if any(self.sums) else None
        by_address = None not in [launcher.launch for launcher in (*launchers, finisher) if launcher is not None]
        found = Prepared(
            steps=tuple(Step(_launch(by, by_address), grid) for by, grid in zip(launchers, grids, strict=True)),
            finish=None if finisher is None else _launch(finisher, by_address),
            finish_grid=(-(-n // _FINAL_BLOCK), 1, 1),
            rows=tile.rows,
            most_programs=rule.programs(tile, n, device),
            row_terms=len(rule.row_terms),
            exchange=None if rule.exchange is None else rule.exchange(tile, n),
            by_address=by_address,
        )
        self._prepared[size] = found
        return found

    def _launcher(self, step: rules.Step, rule: rules.Backward, tile: Tile, m: int) -> Launcher:
        partial = pointer_type(torch.float32, aligned=True)
        types = {
            **self._inputs,
            "dx_ptr": None if self.dx_dtype is None else pointer_type(self.dx_dtype, aligned=True),
            **{f"{name}_ptr": partial if wanted else None for name, wanted in zip(SUMS, self.sums, strict=True)},
            **dict.fromkeys(rule.row_terms, partial),
            "exchange_ptr": None if rule.exchange is None else pointer_type(torch.int64, aligned=True),
            "M": integer_type(m),
            "weight_offset": "fp32",
        }
        chunked = replace(tile, block=step.block(tile))
        constants = {
            **rules.constants(chunked, self.n, row_alignment(*self._strides.values())),
            **rule.constants(tile, self.n),
        }
        kernel = self._entry.load(step.part or tile)
        options = rules.compiler_options(rule.options, tile, self._device)
        return Launcher(kernel, types, self._strides, constants, tile.warps, options, self._device)

    def _finisher(self) -> Launcher:
        partial = pointer_type(torch.float32, aligned=True)
        wanted = zip(SUMS, self._sums, strict=True)
        gradients = {f"{name}_ptr": None if d is None else pointer_type(d, aligned=True) for name, d in wanted}
        partials = {
            f"{name}_partials_ptr": partial if wanted else None for name, wanted in zip(SUMS, self.sums, strict=True)
        }
        constants = {"N": self.n, "ROWS": _FINAL_ROWS, "BLOCK": _FINAL_BLOCK}
        types = {**partials, **gradients, "programs": integer_type(0)}
        return Launcher(self._entry.load_finaliser(), types, {}, constants, _FINAL_WARPS, {}, self._device)


def _launch(launcher: Launcher, by_address: bool) -> Launch:
    return launcher.launch if by_address and launcher.launch is not None else launcher.launch_tensors


def mode_of(norm: Norm, x: torch.Tensor, x_bias: bool, fadd: FusedAdd) -> Mode:
    """The mode of a backward call; fadd says whether the stored sum has a gradient."""
    dtype = DTYPES[x.dtype]
    return Mode(norm, dtype, dtype, fadd, x_bias=x_bias, direction=Direction.BACKWARD)

"""Cells and suites: a cell is one timed problem of a family, a suite a table of cells and how they are timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class Norm(Enum):
    """Which norm."""

    LAYER = "ln"
    RMS = "rms"


class Task(Enum):
    """The work of one timed call."""

    FORWARD = "forward"  # y
    ADD = "add"  # residual_out = x + residual, and y of the sum
    DROP_ADD = "drop_add"  # as ADD, behind a dropout of x
    QUANT = "quant"  # y quantised, with a scale a row
    ADD_QUANT = "add_quant"  # both
    QUANTISED = "quantised"  # y quantised as engines have it
    ADD_QUANTISED = "add_quantised"  # both
    LATENTS = "latents"  # the norms of two latents, both quantised
    SCALED = "scaled"  # y, in 16 bits, of an fp8 x times its scale
    BACKWARD = "backward"  # dx, dweight and, for LayerNorm, dbias; nothing of the forward pass
    MODULE = "module"  # y of a module that is called under no_grad
    GRAD_FORWARD = "grad_forward"  # y, recorded for a backward pass
    GRAD_BOTH = "grad_both"  # that, and the backward pass
    GROUP = "group"  # y of GroupNorm
    GROUP_BACKWARD = "group_backward"  # its dx, dweight and dbias
    GATED = "gated"  # y of a norm times an activated gate
    GATED_BACKWARD = "gated_backward"  # its dx, dgate, dweight and, for LayerNorm, dbias
    MODULATED = "modulated"  # y of a norm scaled and shifted by sample
    MODULATED_BACKWARD = "modulated_backward"  # its dx, dscale, dshift and, where x is gated, dgate and dresidual
    RENORMED = "renormed"  # residual_out = residual + a norm of x, and y of the sum
    RENORMED_BACKWARD = "renormed_backward"  # its dx, dresidual, and those of both norms' vectors
    CHANNELS = "channels"  # y of a norm over the channels of images
    CHANNELS_BACKWARD = "channels_backward"  # its dx, dweight and, for LayerNorm, dbias
    ROTARY = "rotary"  # q and k, each head normalised and rotated
    ROTARY_BACKWARD = "rotary_backward"  # the gradients of q, k and both weights

    @property
    def adds(self) -> bool:
        """Return True if a residual is added and the sum stored."""
        return self in (Task.ADD, Task.DROP_ADD, Task.ADD_QUANT, Task.ADD_QUANTISED)

    @property
    def quantises(self) -> bool:
        """Return True if y is quantised."""
        return self in (Task.QUANT, Task.ADD_QUANT, Task.QUANTISED, Task.ADD_QUANTISED, Task.LATENTS)

    @property
    def differentiates(self) -> bool:
        """Return True if the outputs are gradients."""
        return self is Task.GRAD_BOTH or self.value.endswith("backward")

    @property
    def renorms(self) -> bool:
        """Return True if a residual is added between two norms."""
        return self in (Task.RENORMED, Task.RENORMED_BACKWARD)


# Tensors of x's size that a task has to read and write, where they are not two.
_WHOLE = {
    **dict.fromkeys((Task.BACKWARD, Task.GROUP_BACKWARD, Task.CHANNELS_BACKWARD, Task.ROTARY_BACKWARD, Task.GATED), 3),
    **dict.fromkeys((Task.GRAD_BOTH, Task.GATED_BACKWARD), 5),
    Task.RENORMED: 4,
    Task.RENORMED_BACKWARD: 6,
}


class Method(Enum):
    """How a call is timed; `timing` says what each does."""

    COLD = "cold"
    GRAPH = "graph"
    HOST = "host"


@dataclass(frozen=True)
class Cell:
    """One problem: a task on x of m rows and n columns.

    Attributes:
        task: what is computed.
        norm: by which norm.
        m: rows.
        n: columns.
        dtype: of x, weight, bias, residual and the gradients; a word of `DTYPES`.
        out_dtype: of y where it is not x's; empty elsewhere.
        smooth: whether y is multiplied by a scale a column before it is quantised.
        group: which part of its suite the cell belongs to, for tables and pictures.
        heads: of x and dy, how many rows a token has, and how many there is room for in a packed tensor: x and dy are
            then (tokens, heads, n), x's rows on two strides. 0 and 0 of rows that adjoin.
    """

    task: Task
    norm: Norm
    m: int
    n: int
    dtype: str = "bf16"
    out_dtype: str = ""
    smooth: bool = False
    group: str = ""
    heads: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `ln_bf16_int8_sdq`."""
        quant = ("sdq" if self.smooth else "dq") if self.task.quantises else ""
        heads = "h{}of{}".format(*self.heads) if self.heads[0] else ""
        return "_".join(filter(None, (self.norm.value, self.dtype, self.out_dtype, quant, heads)))

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of x but for its columns."""
        return (self.m // self.heads[0], self.heads[0]) if self.heads[0] else (self.m,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of x."""
        return (*self.leading, self.n)

    @property
    def id(self) -> str:
        """The cell's name, unique within its suite: `add_quant/ln_bf16_int8_sdq/16384x8192`."""
        return f"{self.task.value}/{self.kind}/{self.m}x{self.n}"

    @property
    def bytes_moved(self) -> int:
        """Bytes that have to be read and written: whole (m, n) tensors only, each once."""
        whole = _WHOLE.get(self.task, 2) + (2 if self.task.adds else 0)
        size = DTYPES[self.dtype].itemsize
        out = DTYPES[self.out_dtype].itemsize if self.task.quantises else size
        return self.m * self.n * (size * (whole - 1) + out)

    @property
    def copy_bytes(self) -> int:
        """Bytes that a copy of x reads and writes."""
        return 2 * self.m * self.n * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class GatedCell(Cell):
    """A gated norm, activated by SiLU.

    Attributes:
        gate_first: whether what is normalised was gated, as Mamba2 has it.
        columns: of a group that is normalised by itself; 0 is all.
        projected: whether x and the gate are halves of one tensor, and so rows on a stride of twice their length.
    """

    gate_first: bool = False
    columns: int = 0
    projected: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `rms_bf16_first_g1024`."""
        words = (
            "first" if self.gate_first else "",
            f"g{self.columns}" if self.columns else "",
            "projected" if self.projected else "",
        )
        return "_".join(filter(None, (super().kind, *words)))


@dataclass(frozen=True)
class GroupCell(Cell):
    """GroupNorm of one shape.

    Attributes:
        shape: x's.
        groups: of a sample.
        channels_last: whether channels are innermost.
        silu: whether SiLU follows.
    """

    shape: tuple[int, ...] = ()
    groups: int = 32
    channels_last: bool = False
    silu: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `gn_bf16_silu_last`."""
        words = ("gn", self.dtype, "silu" if self.silu else "", "last" if self.channels_last else "")
        return "_".join(filter(None, words))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape with as many samples as there are rows for."""
        return (max(1, self.m // self.groups), *self.shape[1:])

    @property
    def id(self) -> str:
        """The cell's name, unique within its suite: `group/gn_bf16_silu/2x320x64x64`."""
        return f"{self.task.value}/{self.kind}/{'x'.join(map(str, self.sizes))}"


@dataclass(frozen=True)
class ChannelsCell(GroupCell):
    """A norm over dim 1 of one shape, whose samples are its rows."""

    groups: int = 1

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `rms_bf16_last`."""
        return "_".join(filter(None, (self.norm.value, self.dtype, "last" if self.channels_last else "")))


@dataclass(frozen=True)
class RotaryCell(Cell):
    """RMSNorm and rotary embedding of the heads of q, which are x, and of k, views of a packed qkv.

    Attributes:
        kv_heads: of k, and of v, which is not touched; `heads` says how many q has, and how many all three have.
    """

    heads: tuple[int, int] = (32, 48)
    kv_heads: int = 8

    @property
    def bytes_moved(self) -> int:
        """The heads of q and of k, each once; the tables are 1 % of these."""
        return super().bytes_moved // self.heads[0] * (self.heads[0] + self.kv_heads)


def cell_of(
    task: Task, shape: tuple[int, ...], *, channels_last: bool, silu: bool, groups: int = 32, dtype: str = "bf16"
) -> GroupCell:
    """Return a cell, in the part of its suite that its task and layout name."""
    m = shape[0] * groups
    part = f"{'backward' if task is Task.GROUP_BACKWARD else 'forward'}{', channels last' if channels_last else ''}"
    options: dict[str, Any] = {"shape": shape, "groups": groups, "channels_last": channels_last, "silu": silu}
    return GroupCell(task, Norm.LAYER, m, math.prod(shape) // m, dtype, group=part, **options)


@dataclass(frozen=True)
class ModulatedCell(Cell):
    """A modulated norm without a weight, as DiT has it.

    Attributes:
        samples: of which the rows are, as many of each.
        gated: whether x is gated by sample and a residual added first, and the sum returned too.
    """

    samples: int = 32
    gated: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `ln_bf16_gated`."""
        return "_".join(filter(None, (super().kind, "gated" if self.gated else "")))

    @property
    def leading(self) -> tuple[int, ...]:
        """The shape of x but for its columns."""
        samples = min(self.samples, self.m)
        return samples, self.m // samples

    @property
    def bytes_moved(self) -> int:
        """Whole tensors only, each once.

        Forward x and y, and of a gated cell the residual and the sum. Backward x, dy and dx; of a gated cell the sum
        and its gradient are read too, and the residual's gradient is written.
        """
        whole = 3 if self.task is Task.MODULATED_BACKWARD else 2
        gated = 3 if self.task is Task.MODULATED_BACKWARD else 2
        rows = self.leading[0] * self.leading[1]
        return rows * self.n * DTYPES[self.dtype].itemsize * (whole + (gated if self.gated else 0))


@dataclass(frozen=True)
class QuantisedCell(Cell):
    """A norm of bf16 rows, quantised to fp8_e4m3fn.

    Attributes:
        columns: of a group that has a scale; 0 is a scale a row.
        column_major: whether scales of a group's rows lie side by side.
        packed: whether scales are powers of two, of which four exponents make an int32.
        static: whether one scale is given for all.
        unquantised: whether y is returned in x's dtype too.
        way: of MLA's latents, which are columns of one projection: "together" in one call, "apart" in a call each, or
            "alone", the latent of queries, which is x, alone; "" is another norm.
        kv_columns: of the latent of keys and values.
    """

    out_dtype: str = "fp8"
    columns: int = 0
    column_major: bool = False
    packed: bool = False
    static: bool = False
    unquantised: bool = False
    way: str = ""
    kv_columns: int = 0

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `rms_bf16_fp8_g128_column`."""
        scales = "static" if self.static else f"g{self.columns}" if self.columns else "row"
        words = (
            "column" if self.column_major else "",
            "packed" if self.packed else "",
            "two" if self.unquantised else "",
            self.way,
        )
        return "_".join(filter(None, (self.norm.value, self.dtype, self.out_dtype, scales, *words)))

    @property
    def group_columns(self) -> int:
        """How many columns share a scale."""
        return self.columns or self.n

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that are written."""
        groups = self.m * -(-self.n // self.group_columns)
        return 0 if self.static else groups * (1 if self.packed else 4)

    @property
    def bytes_moved(self) -> int:
        """Whole tensors, each once, and the scales that are written, which are 1 % of them in groups of 128."""
        second = self.m * self.n * DTYPES[self.dtype].itemsize if self.unquantised else 0
        columns = self.n if self.way == "alone" else self.n + self.kv_columns
        return (super().bytes_moved + second + self.scale_bytes) * columns // self.n


@dataclass(frozen=True)
class Fp8Cell(Cell):
    """A norm of fp8 rows, to bf16; weight and bias are bf16 too.

    Attributes:
        one_scale: whether all of x has one scale, and not each row its own.
    """

    dtype: str = "fp8"
    out_dtype: str = "bf16"
    one_scale: bool = False

    @property
    def kind(self) -> str:
        """Everything but the shape, as in `ln_fp8_bf16_row`."""
        return f"{self.norm.value}_{self.dtype}_{self.out_dtype}_{'tensor' if self.one_scale else 'row'}"

    @property
    def bytes_moved(self) -> int:
        """X and y, each once; scales are 0.4 % of them at most, as rows are of 1024 and more."""
        return self.m * self.n * (DTYPES[self.dtype].itemsize + DTYPES[self.out_dtype].itemsize)


@dataclass(frozen=True)
class Suite:
    """A table of cells that are timed alike.

    Attributes:
        name: what `--suite` takes.
        title: for tables and pictures.
        method: how a call is timed.
        cells: in the order they are run.
        along: which of m and n its pictures have on the horizontal axis.
        unit: what its pictures have on the vertical one.
        sweeps: whether its cells are many sizes of one problem, to be drawn as lines.
        draw: of a suite whose cells are drawn, the cells of a seed; None elsewhere.
        seed: what its cells were drawn by; None where none are.
    """

    name: str
    title: str
    method: Method
    cells: tuple[Cell, ...]
    along: Literal["m", "n"] = "n"
    unit: Literal["GB/s", "µs"] = "GB/s"
    sweeps: bool = True
    draw: Callable[[int], tuple[Cell, ...]] | None = None
    seed: int | None = None

    def of_seed(self, seed: int | None) -> Suite:
        """Return the suite with the cells of another seed; the suite itself for None, or if its cells are not drawn."""
        if self.draw is None or seed in (None, self.seed):
            return self
        assert seed is not None
        return replace(self, cells=self.draw(seed), seed=seed)

    @property
    def has_ceiling(self) -> bool:
        """Return True if a copy of x bounds the cells' throughput."""
        return self.method is Method.COLD


def rows_of(mebibytes: int, n: int, dtype: str = "bf16") -> int:
    """How many rows of n make x that large, rounded down to a multiple of 8, so that a copy of x stays vectorised."""
    return max(8, mebibytes * 2**20 // (n * DTYPES[dtype].itemsize) // 8 * 8)


def at_most(cells: Iterable[Cell], rows: int | None) -> tuple[Cell, ...]:
    """Return the cells with at most `rows` rows each, the first of those that become equal; all cells for None."""
    if rows is None:
        return tuple(cells)
    first: dict[str, Cell] = {}
    for cell in cells:
        whole = max(rows, cell.heads[0])
        capped = replace(cell, m=min(cell.m, whole - whole % (cell.heads[0] or 1)))
        first.setdefault(capped.id, capped)
    return tuple(first.values())

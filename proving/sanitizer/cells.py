"""The calls that are sanitised: from the table in use, a smallest call for everything that kernels are made of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

import normforge
from normforge.codegen.families import Kind, Parameter
from normforge.codegen.instance import Tile
from normforge.codegen.model import Mode
from normforge.codegen.parameters import FORWARD, RENORMED, family_of
from normforge.codegen.values import Direction, DType, Part, Pipeline
from normforge.dtypes import TORCH_DTYPES, arguments_of
from normforge.kernels.pipelines import anywhere
from normforge.selection import dispatch
from normforge.selection.table import Entry

from .beside import TABLE, Beside, beside

# Whose tiles are sanitised.
ARCH = "sm_90"
_FEW = 3
# Elements of 16 bytes of a 16-bit type: for rows that do not start at multiples of it there are other kernels.
_VECTOR = 8


@dataclass(frozen=True)
class Cell:
    """One call.

    Attributes:
        mode: what is computed.
        m: rows.
        n: row length.
        stride: elements from row to row of what is read; None is n. Of heads, from token to token.
        offset: elements of memory ahead of the first row of what is read.
        heads: how many rows lie side by side, n apart, in each token of a packed tensor; 0 is rows on one stride.
        in_place: whether y is written over x.
    """

    mode: Mode
    m: int
    n: int
    stride: int | None = None
    offset: int = 0
    heads: int = 0
    in_place: bool = False

    @property
    def name(self) -> str:
        """One word for tables and logs."""
        stride = "" if self.stride is None else f"_stride{self.stride}"
        offset = f"_offset{self.offset}" if self.offset else ""
        heads = f"_heads{self.heads}" if self.heads else ""
        in_place = "_in_place" if self.in_place else ""
        return f"{self.mode.name}_{self.m}x{self.n}{stride}{offset}{heads}{in_place}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x: (m, n), or (tokens, heads, n)."""
        return (self.m // self.heads, self.heads, self.n) if self.heads else (self.m, self.n)

    def call(self, device: torch.device) -> None:
        """Make the call."""
        function, arguments = self.arguments(device)
        getattr(normforge, function)(**arguments)

    def arguments(self, device: torch.device) -> tuple[str, dict[str, Any]]:
        """Return the function of the call, and the call's arguments."""
        mode, family = self.mode, family_of(self.mode)
        arguments = arguments_of(mode, partial(self._operand, device))
        if mode.is_backward:
            arguments["wants"] = [row.name for row in family.results if row.is_wanted(mode)]
        if self.in_place:
            arguments["out"] = arguments["x"]
        name = FORWARD.functions[mode.norm]
        return f"renormed_{name}" if family is RENORMED else family.functions[mode.norm], arguments

    def _operand(self, device: torch.device, parameter: Parameter) -> torch.Tensor:
        """Rows end with their memory; what is ahead of the first and between is not written."""
        dtype, n = TORCH_DTYPES[self.mode.dtype_in], self.n
        if parameter.kind is Kind.PER_ROW:
            return torch.ones(self.shape[:-1], device=device)
        if parameter.kind is not Kind.ROWS:
            return torch.linspace(0.5, 1.5, n).to(dtype).to(device)
        strides = (n if self.stride is None else self.stride, *((n,) if self.heads else ()), 1)
        last = sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
        memory = torch.empty(self.offset + last + 1, dtype=dtype, device=device)
        # By copies alone: what a kernel of torch's reads is not what is looked for.
        rows = memory.as_strided(self.shape, strides, self.offset)
        return rows.copy_(torch.linspace(-1, 1, n).to(dtype).expand(self.shape))


# A call, and what it would cover.
_Candidate = tuple[Cell, frozenset[Hashable]]


class TileKind(NamedTuple):
    """A class of tiles, as far as another one makes other machine code: what they count does not matter.

    Attributes:
        direction: of the kernel.
        pipeline: of the kernel.
        few: whether rows are few.
        staged: whether rows are on their way to shared memory.
        held: whether chunks are kept.
        resident: whether several programs share a multiprocessor, with fewer registers.
    """

    direction: Direction
    pipeline: Pipeline
    few: bool
    staged: bool
    held: bool
    resident: bool


def kind_of(direction: Direction, tile: Tile, *, few: bool) -> TileKind:
    """Return the class of a tile."""
    return TileKind(direction, tile.pipeline, few, tile.stages > 1, tile.held > 0, tile.resident > 1)


def text_of(mode: Mode) -> Mode:
    """Return the mode that represents all whose kernels differ in nothing but element types."""
    # Of 16 bits, because `cast` needs a type that has them.
    out = mode.dtype_out if mode.fquant.quantises else DType.BF16
    return replace(mode, dtype_in=DType.BF16, dtype_out=out, scale_dtype=DType.FP32)


def cells() -> list[Cell]:
    """Every call: what covers the table, without what the process has generated on demand, then the edges."""
    return list(dict.fromkeys((*covering(dispatch.loaded()), *edges())))


def covering(entries: Iterable[Entry]) -> Iterator[Cell]:
    """Small calls that together run each kernel text, each kernel for each type of x, and each class of tiles."""
    covered: set[Hashable] = set()
    candidates = (candidate for entry in entries for candidate in _candidates(entry))
    for cell, covers in sorted(candidates, key=lambda candidate: (candidate[0].m * candidate[0].n, candidate[0].name)):
        if not covers <= covered:
            covered |= covers
            yield cell


def _candidates(entry: Entry) -> Iterator[_Candidate]:
    mode = Mode.from_name(entry.mode)
    for m in (_FEW, entry.small_m + 1, entry.some_m + 1):
        few = m <= entry.small_m
        n = _length(entry, mode, entry.tile(m, entry.first, ARCH))
        tile = entry.tile(m, n, ARCH)
        kind = kind_of(mode.direction, tile, few=few)
        yield _candidate(mode, m, n, tile.pipeline, kind)
        # Lengths such as 4097 start no row where a vector starts but the first.
        odd = _odd(entry)
        if found := anywhere(mode, tile, odd, {"x_ptr": odd}, (), few=few):
            yield _candidate(mode, m, odd, found[0], kind._replace(staged=False))


def _candidate(mode: Mode, m: int, n: int, part: Pipeline | Part, kind: TileKind) -> _Candidate:
    covers = (part, text_of(mode)), (part, mode.direction, mode.dtype_in), (part, kind)
    return Cell(mode, m, n), frozenset(covers)


def _odd(entry: Entry) -> int:
    """Return the shortest row of an entry, and of 9 elements or more, that is one longer than whole vectors."""
    return entry.first + (1 - entry.first) % _VECTOR if entry.first > 1 else _VECTOR + 1


def _length(entry: Entry, mode: Mode, tile: Tile) -> int:
    """Return a short row whose last chunk is ragged, where the kernel that a tile names runs as it says."""
    if (mode.has_window or mode.has_unaligned) and tile.pipeline is not Pipeline.ROWS:
        return _odd(entry) + _VECTOR - 1
    # 16-bit rows go to shared memory, and between programs, in pairs.
    in_pairs = mode.dtype_in.itemsize == 2 and (tile.stages > 1 or tile.pipeline is Pipeline.SPREAD)
    return _odd(entry) + in_pairs


_MODES = ("ln_fwd_bf16", "rms_fwd_bf16_mv", "ln_fwd_fp32", "ln_bwd_bf16", "rms_bwd_fp32")


def edges() -> Iterator[Cell]:
    """Shapes and strides at which reads of whole vectors may leave what is x's, and writes what is y's."""
    for mode in map(Mode.from_name, _MODES):
        for m, n, stride, offset in TABLE["edges"]:
            yield Cell(mode, m, n, stride, offset)
        for m, n, stride, offset, heads in TABLE["heads"]:
            for in_place in (False,) if mode.is_backward else (False, True):
                yield Cell(mode, m, n, stride, offset, heads, in_place)


def every() -> list[Cell | Beside]:
    """Return the table's calls, and the calls of kernels that the table lacks."""
    return [*cells(), *beside()]


def share(all_cells: Sequence[Cell | Beside], part: int, parts: int) -> list[Cell | Beside]:
    """One of several parts of the cells, counted from 1; each is about as much work."""
    return sorted(all_cells, key=lambda cell: -cell.m * cell.n)[part - 1 :: parts]

"""One case measured: ours, torch's operator and fp64 on the same rows, kind by kind."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import normforge
from normforge.calls.straight import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Part, Pipeline
from normforge.dtypes import TORCH_DTYPES
from normforge.kernels.gpu import interpreting
from normforge.selection import dispatch, on_demand
from normforge.selection.table import Entry, RetiledTable

from . import peer
from .cases import Case, Layout, rows_of_a_kind
from .interpreter import adding_by_halves
from .peer import EPS
from .rows import KINDS
from .units import MOST, Error, Exact, median, ratio, rounded


@dataclass(frozen=True)
class Cell:
    """One output of one kind of rows in one case.

    Attributes:
        pipeline: the kernel that ran, as its name ends; with "head" behind it if a pivot came from the first values.
        direction: "fwd" or "bwd".
        mode: the mode's name.
        dtypes: x's and y's, in words.
        n: row length.
        tile: the tile's fields.
        kind: one of `KINDS`.
        output: "y", "mean", "rstd", "y_scale", "dx", "dweight" or "dbias".
        ours: our error.
        torch: torch's.
        ratio: how many times torch's ours is, as the rule counts.
    """

    pipeline: str
    direction: str
    mode: str
    dtypes: str
    n: int
    tile: str
    kind: str
    output: str
    ours: Error
    torch: Error
    ratio: float

    @property
    def ok(self) -> bool:
        """Whether the rule holds."""
        return self.ratio <= MOST


@dataclass(frozen=True)
class Operands:
    """What a call is given; rows of each kind follow one another."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    dy: torch.Tensor | None

    def of(self, part: slice) -> Operands:
        """The same of some rows."""
        residual, dy = (None if t is None else t[part] for t in (self.residual, self.dy))
        return Operands(self.x[part], self.weight, self.bias, residual, dy)


def measure(case: Case, device: torch.device, seed: int) -> list[Cell]:
    """Every cell of a case."""
    dtype = TORCH_DTYPES[case.mode.dtype_in]
    kinds = [name for name, kind in KINDS.items() if dtype in kind.dtypes]
    if device.type == "cpu" and DType.BF16 in (case.mode.dtype_in, case.mode.dtype_out):
        kinds.remove("denormal")  # Triton's interpreter reads and writes bf16 below the smallest normal number wrongly
    operands = _draw(case, kinds, device, seed)
    with _tiled(case) as loaded:
        run = _backward if case.mode.is_backward else _forward
        cells = list(run(case, kinds, operands))
    pipeline = _label(case, loaded)
    return [_cell(case, pipeline, *cell) for cell in cells]


Found = tuple[str, str, torch.dtype, Error, Error]


def _cell(case: Case, pipeline: str, kind: str, output: str, dtype: torch.dtype, ours: Error, theirs: Error) -> Cell:
    mode = case.mode
    same = mode.dtype_out is mode.dtype_in
    dtypes = mode.dtype_in.value if same else f"{mode.dtype_in.value} → {mode.dtype_out.value}"
    if mode.fadd.adds:
        dtypes = f"{dtypes}, add"
    if mode.cast.comes_first:
        dtypes = f"{dtypes}, rounded first"
    if case.layout is not Layout.ADJOINING:
        dtypes = f"{dtypes}, {case.layout.value}"
    tile = " ".join(str(value) for value in case.tile.row)
    direction = "bwd" if mode.is_backward else "fwd"
    return Cell(
        pipeline, direction, mode.name, dtypes, case.n, tile, kind, output, ours, theirs, ratio(ours, theirs, dtype)
    )


@contextmanager
def _tiled(case: Case) -> Iterator[list[str]]:
    """Make calls of a case's mode and length take its tile, and note which kernels are loaded."""
    entry = on_demand.generate(case.mode, case.n, "a table of tiles to measure")
    loaded: list[str] = []
    load = Entry.load

    def noting(self: Entry, part: Pipeline | Part) -> Any:
        loaded.append(part.value)
        return load(self, part)

    using = dispatch.using(RetiledTable(dispatch.loaded(), entry, case.tile))
    with using, mock.patch.object(Entry, "load", noting), adding_by_halves() if interpreting() else nullcontext():
        yield loaded


def _label(case: Case, loaded: list[str]) -> str:
    """The kernels that ran, which must be those that the case is about."""
    ran = set(loaded)
    asked = case.tile.pipeline.value
    expected = {asked}
    if case.mode.is_backward and case.tile.pipeline is Pipeline.TWO_PASS:
        expected = {asked, Part.ROW_TERMS.value}
    if ran == {Part.WINDOW.value} and case.mode.has_window:
        return Part.WINDOW.value
    if ran != expected:
        raise AssertionError(f"{case.name}: {sorted(ran)} ran where {sorted(expected)} should have")
    few = case.n <= 2 * case.tile.block and case.mode.dtype_in.itemsize == 2
    is_head = asked == Pipeline.ONE_PASS.value and few and not case.mode.is_backward and case.mode.norm.centres
    return f"{asked}, head" if is_head else asked


def _draw(case: Case, kinds: list[str], device: torch.device, seed: int) -> Operands:
    mode, n = case.mode, case.n
    dtype = TORCH_DTYPES[mode.dtype_in]
    count = rows_of_a_kind(n, device)

    def generator(name: str) -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name} {n} {mode.dtype_in}".encode()))

    def rows(name: str) -> torch.Tensor:
        return torch.cat([KINDS[kind].rows(count, n, dtype, generator(f"{name} {kind}")) for kind in kinds])

    def normal(name: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator(name), dtype=torch.float64, device=device)

    # A bias would hide errors of what is small beside it: only calls that add have one.
    has_bias = mode.norm.centres and mode.fadd.adds
    # T5's and Llama's y has the type that weight and rounded row have together.
    is_of_y = mode.cast.comes_first and not mode.fquant.quantises
    return Operands(
        x=rows("x"),
        weight=(1 + 0.1 * normal("weight", n)).to(TORCH_DTYPES[mode.dtype_out] if is_of_y else dtype),
        bias=(0.01 * normal("bias", n)).to(dtype) if has_bias else None,
        residual=rows("residual") if mode.fadd.adds else None,
        dy=normal("dy", len(kinds) * count, n).to(dtype) if mode.is_backward else None,
    )


def _parts(kinds: list[str], operands: Operands) -> Iterator[tuple[str, slice]]:
    count = len(operands.x) // len(kinds)
    for index, kind in enumerate(kinds):
        yield kind, slice(index * count, (index + 1) * count)


def _forward(case: Case, kinds: list[str], operands: Operands) -> Iterator[Found]:
    actual = _ours(case, operands)
    for kind, part in _parts(kinds, operands):
        rows = operands.of(part)
        theirs = _theirs(case.mode, rows)
        for name, exact in _exact(case.mode, rows).items():
            ours = actual[name][part]
            yield kind, name, ours.dtype, exact.error_of(ours), exact.error_of(theirs[name])


# Of a packed tensor: so many that are normalised, and as many behind them that are not.
_HEADS = 2


def _laid(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(M, N) rows as a call takes them; what lies between heads and is none of them is NaN."""
    if layout is Layout.ADJOINING:
        return rows
    heads = rows.view(-1, _HEADS, rows.shape[-1])
    return torch.cat((heads, torch.full_like(heads, torch.nan)), 1)[:, :_HEADS]


def _ours(case: Case, operands: Operands) -> dict[str, torch.Tensor]:
    mode, x = case.mode, _laid(operands.x, case.layout)
    keywords: dict[str, Any] = {"eps": EPS, "save_mv": mode.save_mv, "fquant": mode.fquant, "cast": mode.cast}
    keywords |= {"out_dtype": TORCH_DTYPES[mode.dtype_out]}
    if operands.residual is not None:
        keywords |= {"residual": operands.residual, "fadd": mode.fadd}
    if case.layout is Layout.HEADS_IN_PLACE:
        keywords["out"] = x
    if mode.norm.centres:
        output = normforge.layernorm2d_fwd(x, operands.weight, operands.bias, **keywords)
    else:
        output = normforge.rmsnorm2d_fwd(x, operands.weight, **keywords)
    leading = x.dim() - 1
    return {name: tensor.flatten(0, leading - 1) for name, tensor in output._asdict().items() if tensor is not None}


def _first_rounded_to(mode: Mode) -> torch.dtype | None:
    """The 16-bit type that rows are rounded to before the weight, if they are: y's, or else x's."""
    if not mode.cast.comes_first:
        return None
    return next(TORCH_DTYPES[dtype] for dtype in (mode.dtype_out, mode.dtype_in) if dtype.itemsize == 2)


def _theirs(mode: Mode, rows: Operands) -> dict[str, torch.Tensor]:
    x, weight, bias = rows.x, rows.weight, rows.bias
    out, half = TORCH_DTYPES[mode.dtype_out], _first_rounded_to(mode)
    if out != x.dtype or rows.residual is not None:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    if rows.residual is not None:
        x = x + rows.residual.float()
    if half is None:
        found = peer.forward(mode.norm.centres, x, weight, bias)
    else:
        found = peer.forward_rounding_first(mode.norm.centres, x, weight, bias, half)
    if mode.fquant.quantises:
        return {"y_scale": found["y"].abs().amax(-1) / mode.dtype_out.qmax}
    return found | {"y": found["y"].to(out)}


def _exact(mode: Mode, rows: Operands) -> dict[str, Exact]:
    s = rows.x.double()
    if rows.residual is not None:
        # The sum is defined in fp32, and is what both are given.
        s = (rows.x.float() + rows.residual.float()).double()
    mean = s.mean(-1, keepdim=True) if mode.norm.centres else torch.zeros_like(s[:, :1])
    rstd = ((s - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    half = _first_rounded_to(mode)
    h = (s - mean) * rstd
    h, either = (h, torch.zeros_like(h)) if half is None else rounded(h, half)
    y, either = h * rows.weight.double(), either * rows.weight.double().abs()
    if rows.bias is not None:
        y += rows.bias.double()
    if mode.fquant.quantises:
        low, y_scale, high = (
            magnitude.amax(-1) / mode.dtype_out.qmax for magnitude in (y.abs() - either, y.abs(), y.abs() + either)
        )
        return {"y_scale": Exact(y_scale, torch.zeros_like(y_scale), torch.maximum(high - y_scale, y_scale - low))}
    found = {
        "y": Exact(y, median(y), None if half is None else either),
        "rstd": Exact(rstd[:, 0], torch.zeros_like(rstd[:, 0])),
    }
    if mode.norm.centres:
        found["mean"] = Exact(mean[:, 0], s.abs().mean(-1))
    return found


def _backward(case: Case, kinds: list[str], operands: Operands) -> Iterator[Found]:
    """Both are given the same statistics: fp64's, rounded to fp32 as a forward call saves them."""
    centres = case.mode.norm.centres
    for kind, part in _parts(kinds, operands):
        rows = operands.of(part)
        assert rows.dy is not None
        s = rows.x.double()
        mean = s.mean(-1) if centres else torch.zeros_like(s[:, 0])
        rstd = ((s - mean.unsqueeze(-1)).square().mean(-1) + EPS).rsqrt()
        statistics = {"rstd": rstd.float()} | ({"mean": mean.float()} if centres else {})
        wants = ("dx", "dweight", "dbias") if centres else ("dx", "dweight")
        actual = _our_gradients(case, rows, statistics, wants)
        theirs = peer.backward(centres, rows.dy, rows.x, rows.weight, statistics)
        oracle: Any = normforge.reference.layernorm2d_bwd if centres else normforge.reference.rmsnorm2d_bwd
        expected = oracle(rows.dy, rows.x, rows.weight, **statistics)
        exact = {name: Exact(getattr(expected, name), expected.magnitudes[name]) for name in wants}
        half = _first_rounded_to(case.mode)
        if half is not None:
            theirs["dweight"] = peer.dweight_rounding_first(rows.dy, rows.x, statistics, half)
            h, either = rounded(
                (s - statistics.get("mean", mean).unsqueeze(-1)) * statistics["rstd"].unsqueeze(-1), half
            )
            dy = rows.dy.double()
            exact["dweight"] = Exact((dy * h).sum(0), expected.magnitudes["dweight"], (dy.abs() * either).sum(0))
        for name in wants:
            ours = actual[name]
            yield kind, name, ours.dtype, exact[name].error_of(ours), exact[name].error_of(theirs[name])


def _our_gradients(
    case: Case, rows: Operands, statistics: dict[str, torch.Tensor], wants: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    assert rows.dy is not None
    dy, x = (_laid(tensor, case.layout) for tensor in (rows.dy, rows.x))
    saved = {name: value.view(x.shape[:-1]) for name, value in statistics.items()}
    run: Any = layernorm2d_bwd if case.mode.norm.centres else rmsnorm2d_bwd
    found = run(dy, x, rows.weight, **saved, wants=wants, cast=case.mode.cast)
    return {name: getattr(found, name).view(-1, x.shape[-1]).squeeze(0) for name in wants}

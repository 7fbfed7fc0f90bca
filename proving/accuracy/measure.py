"""One case measured: ours, torch's operator and fp64 on the same rows, kind by kind."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

import normforge
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Part, Pipeline
from normforge.dtypes import TORCH_DTYPES
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.kernels.gpu import interpreting
from normforge.random_mask import dropout_mask
from normforge.reference import BACKWARD
from normforge.selection import dispatch, on_demand
from normforge.selection.table import Entry, RetiledTable

from . import gates, groups, peer
from .cases import Case, rows_of_a_kind
from .groups import GROUPS, GroupCase, Layout
from .interpreter import adding_by_halves
from .peer import EPS
from .rows import KINDS
from .units import MOST, Error, Exact, median, ratio, rounded, statistics


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
        """Return True if the rule holds."""
        return self.ratio <= MOST

    def __str__(self) -> str:
        place = f"{self.pipeline}, {self.mode} N={self.n} {self.tile}, {self.kind}, {self.output}"
        ours, theirs = (f"{error.largest:.1f}, rms {error.rms:.3g}" for error in (self.ours, self.torch))
        return f"{place}: {ours}; torch {theirs}; {self.ratio:.3g} times"


@dataclass(frozen=True)
class Operands:
    """The operands of a call; rows of each kind follow one another."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    dy: torch.Tensor | None
    gate: torch.Tensor | None = None
    keep: torch.Tensor | None = None

    def of(self, part: slice) -> Operands:
        """Return the operands of some rows."""
        tensors = (self.residual, self.dy, self.gate, self.keep)
        residual, dy, gate, keep = (None if tensor is None else tensor[part] for tensor in tensors)
        return Operands(self.x[part], self.weight, self.bias, residual, dy, gate, keep)

    @property
    def kept(self) -> Operands:
        """Return the operands with x after dropout."""
        return self if self.keep is None else replace(self, x=dropped(self.x.float(), self.keep))


# Half of the elements, so that others are doubled, which is exact.
_DROPOUT_P, _DROPOUT_RNG = 0.5, (11939, 3)


def dropped(rows: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return rows after dropout."""
    return torch.where(keep, 2 * rows, 0.0)


def _dropout(device: torch.device) -> dict[str, Any]:
    return {"dropout_p": _DROPOUT_P, "dropout_rng": torch.tensor(_DROPOUT_RNG, device=device)}


def measure(case: Case | GroupCase, device: torch.device, seed: int) -> list[Cell]:
    """Every cell of a case."""
    with _tiled(case) as loaded:
        of = _of_groups(case, device, seed) if isinstance(case, GroupCase) else _of_rows(case, device, seed)
        found = list(of)
    pipeline, mode = _label(case, loaded), case.mode
    direction, tile = "bwd" if mode.is_backward else "fwd", " ".join(str(value) for value in case.tile.row)
    place = (pipeline, direction, mode.name, case.dtypes, case.n, tile)
    return [
        Cell(*place, kind, output, ours, theirs, ratio(ours, theirs, dtype))
        for kind, output, dtype, ours, theirs in found
    ]


# The kind of rows, the output and its dtype, our error and torch's.
Found = tuple[str, str, torch.dtype, Error, Error]


def _of_rows(case: Case, device: torch.device, seed: int) -> Iterator[Found]:
    kinds = _kinds(TORCH_DTYPES[case.mode.dtype_in], device, (case.mode.dtype_in, case.mode.dtype_out))
    run = _backward if case.mode.is_backward else _forward
    yield from run(case, kinds, _draw(case, kinds, device, seed))


def _of_groups(case: GroupCase, device: torch.device, seed: int) -> Iterator[Found]:
    mode, dtype, count = case.mode, TORCH_DTYPES[case.mode.dtype_in], rows_of_a_kind(case.n, device)
    weight = (1 + 0.1 * _normal(_generator(case, device, seed, "weight"), GROUPS * case.channels)).to(dtype)
    for kind in _kinds(dtype, device, (mode.dtype_in,)):
        rows = KINDS[kind].rows(count, case.n, dtype, _generator(case, device, seed, f"x {kind}"))
        if mode.is_backward:
            dy = _normal(_generator(case, device, seed, f"dy {kind}"), count, case.n).to(dtype)
            found = groups.backward(case, rows, dy, weight)
        else:
            found = groups.forward(case, rows, weight)
        for output, of, exact, ours, theirs in found:
            yield kind, output, of, exact.error_of(ours), exact.error_of(theirs)


def _kinds(dtype: torch.dtype, device: torch.device, dtypes: Collection[DType]) -> list[str]:
    kinds = [name for name, kind in KINDS.items() if dtype in kind.dtypes]
    if device.type == "cpu" and DType.BF16 in dtypes:
        kinds.remove("denormal")  # Triton's interpreter reads and writes bf16 below the smallest normal number wrongly
    return kinds


def _generator(case: Case | GroupCase, device: torch.device, seed: int, name: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name} {case.n} {case.mode.dtype_in}".encode()))


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


@contextmanager
def _tiled(case: Case | GroupCase) -> Iterator[list[str]]:
    """Make calls of a case's mode and length take its tile, and note which kernels are loaded."""
    entry = on_demand.generate(case.mode, case.n, "a table of tiles to measure")
    loaded: list[str] = []
    load = Entry.load

    def noting(self: Entry, part: Pipeline | Part | None) -> Any:
        # None is the kernel that adds up partial sums, which every backward call runs.
        loaded.extend([] if part is None else [part.value])
        return load(self, part)

    using = dispatch.using(RetiledTable(dispatch.loaded(), entry, case.tile))
    with using, mock.patch.object(Entry, "load", noting), adding_by_halves() if interpreting() else nullcontext():
        yield loaded


def _label(case: Case | GroupCase, loaded: list[str]) -> str:
    """Return the kernels that ran, which must be those that the case is about."""
    ran, asked = set(loaded), case.tile.pipeline.value
    if isinstance(case, Case) and ran == {Part.WINDOW.value} and case.mode.has_window:
        return Part.WINDOW.value
    expected = {part.value for part in case.parts}
    if ran != expected:
        raise AssertionError(f"{case.name}: {sorted(ran)} ran where {sorted(expected)} should have")
    if isinstance(case, GroupCase):
        return asked
    few = case.n <= 2 * case.tile.block and not case.mode.is_backward
    is_head = asked == Pipeline.ONE_PASS.value and few and case.mode.has_head
    return f"{asked}, head" if is_head else asked


def _draw(case: Case, kinds: list[str], device: torch.device, seed: int) -> Operands:
    mode, n = case.mode, case.n
    dtype = TORCH_DTYPES[mode.dtype_in]
    count = rows_of_a_kind(n, device)

    def rows(name: str) -> torch.Tensor:
        drawn = [(KINDS[kind], _generator(case, device, seed, f"{name} {kind}")) for kind in kinds]
        return torch.cat([kind.rows(count, n, dtype, generator) for kind, generator in drawn])

    def normal(name: str, *shape: int) -> torch.Tensor:
        return _normal(_generator(case, device, seed, name), *shape)

    # A bias would hide errors of what is small beside it: only calls that add have one.
    has_bias = mode.norm.centres and mode.fadd.adds
    m = len(kinds) * count
    # T5's and Llama's y has the type that weight and rounded row have together.
    is_of_y = mode.cast.comes_first and not mode.fquant.quantises
    return Operands(
        x=rows("x"),
        weight=(1 + 0.1 * normal("weight", n)).to(TORCH_DTYPES[mode.dtype_out] if is_of_y else dtype),
        bias=(0.01 * normal("bias", n)).to(dtype) if has_bias else None,
        residual=rows("residual") if mode.fadd.adds else None,
        dy=normal("dy", m, n).to(dtype) if mode.is_backward else None,
        gate=(2 * normal("gate", m, n)).to(dtype) if mode.gating.gates else None,
        keep=_mask((m, n), device) if mode.dropout else None,
    )


def _mask(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return dropout_mask(shape, **_dropout(device))


def _parts(kinds: list[str], operands: Operands) -> Iterator[tuple[str, slice]]:
    count = len(operands.x) // len(kinds)
    for index, kind in enumerate(kinds):
        yield kind, slice(index * count, (index + 1) * count)


def _forward(case: Case, kinds: list[str], operands: Operands) -> Iterator[Found]:
    actual = _ours(case, operands)
    for kind, part in _parts(kinds, operands):
        rows = operands.of(part).kept
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
    if operands.gate is not None:
        return gates.forward(mode, x, operands.gate, operands.weight)
    keywords: dict[str, Any] = {"eps": EPS, "save_mv": mode.save_mv, "fquant": mode.fquant, "cast": mode.cast}
    keywords |= {"out_dtype": TORCH_DTYPES[mode.dtype_out]}
    if operands.residual is not None:
        keywords |= {"residual": operands.residual, "fadd": mode.fadd}
    if mode.dropout:
        keywords |= _dropout(x.device)
    if case.layout is Layout.HEADS_IN_PLACE:
        keywords["out"] = x
    if mode.norm.centres:
        output = normforge.layernorm2d_fwd(x, operands.weight, operands.bias, **keywords)
    else:
        output = normforge.rmsnorm2d_fwd(x, operands.weight, **keywords)
    leading = x.dim() - 1
    return {name: tensor.flatten(0, leading - 1) for name, tensor in output._asdict().items() if tensor is not None}


def _first_rounded_to(mode: Mode) -> torch.dtype | None:
    """Return the 16-bit type that rows are rounded to before the weight, if they are: y's, or else x's."""
    if not mode.cast.comes_first:
        return None
    return next(TORCH_DTYPES[dtype] for dtype in (mode.dtype_out, mode.dtype_in) if dtype.itemsize == 2)


def _theirs(mode: Mode, rows: Operands) -> dict[str, torch.Tensor]:
    x, weight, bias = rows.x, rows.weight, rows.bias
    out, half = TORCH_DTYPES[mode.dtype_out], _first_rounded_to(mode)
    if out != x.dtype or rows.residual is not None:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    if rows.residual is not None:
        x = _stored_sum(rows).float()
    if rows.gate is not None:
        found = gates.torchs(mode, rows.x, rows.gate, rows.weight)
    elif half is None:
        found = peer.forward(mode.norm.centres, x, weight, bias)
    else:
        found = peer.forward_rounding_first(mode.norm.centres, x, weight, bias, half)
    if mode.fquant.quantises:
        return {"y_scale": found["y"].abs().amax(-1) / mode.dtype_out.qmax}
    return found | {"y": found["y"].to(out)}


def _stored_sum(rows: Operands) -> torch.Tensor:
    """Return the sum as it is returned, which is defined in fp32 and is what both are given."""
    assert rows.residual is not None
    return (rows.x.float() + rows.residual.float()).to(rows.residual.dtype)


def _exact(mode: Mode, rows: Operands) -> dict[str, Exact]:
    s = rows.x.double()
    factor = None if rows.gate is None else gates.activated(mode, rows.gate.double())
    if factor is not None and mode.gating.is_before:
        s = s * factor
    if rows.residual is not None:
        s = _stored_sum(rows).double()
    mean, rstd = statistics(s, EPS, centres=mode.norm.centres)
    half = _first_rounded_to(mode)
    h = (s - mean) * rstd
    h, either = (h, torch.zeros_like(h)) if half is None else rounded(h, half)
    y, either = h * rows.weight.double(), either * rows.weight.double().abs()
    if rows.bias is not None:
        y += rows.bias.double()
    if factor is not None and not mode.gating.is_before:
        y *= factor
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


# By the name of a gradient.
Tensors = dict[str, torch.Tensor]


def _backward(case: Case, kinds: list[str], operands: Operands) -> Iterator[Found]:
    """Both are given the same statistics: fp64's, rounded to fp32 as a forward call saves them."""
    mode = case.mode
    for kind, part in _parts(kinds, operands):
        rows = operands.of(part)
        s = rows.x.double()
        if rows.gate is not None and mode.gating.is_before:
            s = s * gates.activated(mode, rows.gate.double())
        mean, rstd = statistics(s, EPS, centres=mode.norm.centres)
        saved = {"rstd": rstd[:, 0].float()} | ({"mean": mean[:, 0].float()} if mode.norm.centres else {})
        ours, theirs, exact = (_plain_gradients if rows.gate is None else _gated_gradients)(case, rows, saved)
        for name, our in ours.items():
            yield kind, name, our.dtype, exact[name].error_of(our), exact[name].error_of(theirs[name])


def _gated_gradients(case: Case, rows: Operands, saved: Tensors) -> tuple[Tensors, Tensors, dict[str, Exact]]:
    assert rows.dy is not None
    assert rows.gate is not None
    mode, given = case.mode, (rows.dy, rows.x, rows.gate, rows.weight)
    ours = gates.backward(mode, *given, saved)
    return ours, gates.torchs_gradients(mode, *given), gates.exact_gradients(mode, *given)


def _plain_gradients(case: Case, rows: Operands, saved: Tensors) -> tuple[Tensors, Tensors, dict[str, Exact]]:
    assert rows.dy is not None
    mode, centres = case.mode, case.mode.norm.centres
    wants = ("dx", "dweight", "dbias") if centres else ("dx", "dweight")
    theirs = peer.backward(centres, rows.dy, rows.x, rows.weight, saved)
    more: dict[str, Any] = {}
    if rows.keep is not None:
        # Of a call's rows, which are these alone.
        more, wants = _dropout(rows.x.device), (*wants, "ddropped")
        theirs["ddropped"] = dropped(theirs["dx"], _mask(tuple(rows.x.shape), rows.x.device))
    expected = BACKWARD[mode.norm](rows.dy, rows.x, rows.weight, **saved, **more)
    exact = {name: Exact(getattr(expected, name), expected.magnitudes[name]) for name in wants}
    half = _first_rounded_to(mode)
    if half is not None:
        theirs["dweight"] = peer.dweight_rounding_first(rows.dy, rows.x, saved, half)
        s, dy = rows.x.double(), rows.dy.double()
        s = s - saved["mean"].unsqueeze(-1) if centres else s
        h, either = rounded(s * saved["rstd"].unsqueeze(-1), half)
        exact["dweight"] = Exact((dy * h).sum(0), expected.magnitudes["dweight"], (dy.abs() * either).sum(0))
    return _our_gradients(case, rows, saved, wants), theirs, exact


def _our_gradients(case: Case, rows: Operands, saved: Tensors, wants: tuple[str, ...]) -> Tensors:
    assert rows.dy is not None
    dy, x = (_laid(tensor, case.layout) for tensor in (rows.dy, rows.x))
    shaped = {name: value.view(x.shape[:-1]) for name, value in saved.items()}
    run: Any = layernorm2d_bwd if case.mode.norm.centres else rmsnorm2d_bwd
    more = _dropout(x.device) if case.mode.dropout else {}
    found = run(dy, x, rows.weight, **shaped, wants=wants, cast=case.mode.cast, **more)
    return {name: getattr(found, name).view(-1, x.shape[-1]).squeeze(0) for name in wants}

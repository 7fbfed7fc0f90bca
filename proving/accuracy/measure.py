"""One case measured: ours, torch's operator and fp64 on the same rows, kind by kind."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from normforge.codegen.groups import GroupMode
from normforge.codegen.model import Mode
from normforge.codegen.values import SEVERAL, DType, Part, Pipeline
from normforge.dtypes import TORCH_DTYPES, rounded_to
from normforge.families import rotary
from normforge.kernels.gpu import interpreting
from normforge.random_mask import dropout_mask
from normforge.selection import dispatch, on_demand
from normforge.selection.table import Entry, RetiledTable

from ..cases import Tensors
from . import exact, ours, peer
from .cases import GROUPS, AnyCase, Case, GroupCase, Layout
from .interpreter import adding_by_halves
from .peer import EPS
from .rows import KINDS
from .units import MOST, Error, Exact, ratio, statistics


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


def dropped(rows: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return rows after dropout."""
    return torch.where(keep, 2 * rows, 0.0)


def measure(case: AnyCase, device: torch.device, seed: int) -> list[Cell]:
    """Every cell of a case."""
    with _tiled(case) as loaded:
        found = [
            (kind, output, wanted.error_of(actual), wanted.error_of(theirs), actual.dtype)
            for kind, output, actual, theirs, wanted in _compared(case, device, seed)
        ]
    direction = "bwd" if case.mode.is_backward else "fwd"
    place = (_label(case, loaded), direction, case.mode.name, case.dtypes, case.n, case.tile_name)
    return [
        Cell(*place, kind, output, actual, theirs, ratio(actual, theirs, dtype))
        for kind, output, actual, theirs, dtype in found
    ]


@contextmanager
def _tiled(case: AnyCase) -> Iterator[list[str | None]]:
    """Make calls of a case's mode and length take its tile, and note which kernels are loaded."""
    entry = on_demand.generate(case.mode, case.n, "a table of tiles to measure")
    loaded: list[str | None] = []

    def noting(home: Any, name: str, word: Callable[..., str | None]) -> Any:
        function = getattr(home, name)

        def noted(*given: Any) -> Any:
            loaded.append(word(*given))
            return function(*given)

        return mock.patch.object(home, name, noted)

    using = dispatch.using(RetiledTable(dispatch.loaded(), entry, case.tile))
    # None is the kernel that adds up partial sums, which every backward call runs.
    rows = noting(Entry, "load", lambda entry, part: part and part.value)
    several, heads = (
        noting(dispatch, "several", lambda _: SEVERAL),
        noting(rotary, "kernel_named", lambda _: rotary.NAME),
    )
    with using, rows, several, heads, adding_by_halves() if interpreting() else nullcontext():
        yield loaded


def _label(case: AnyCase, loaded: list[str | None]) -> str:
    """Return the kernels that ran, which must be those that the case is about."""
    ran, asked = {name for name in loaded if name}, case.tile.pipeline.value
    if isinstance(case, Case) and ran in ({Part.WINDOW.value}, {Part.UNALIGNED.value}):
        return ran.pop()
    own = {Layout.TOGETHER: {asked, SEVERAL}, Layout.ROTATED: {rotary.NAME}}
    expected = own.get(case.layout) or {part.value for part in case.parts}
    if ran != expected:
        raise AssertionError(f"{case.name}: {sorted(ran)} ran where {sorted(expected)} should have")
    if isinstance(case, GroupCase):
        return asked
    if case.layout is Layout.ROTATED:
        return rotary.NAME
    few = case.n <= 2 * case.tile.block and not case.mode.is_backward
    is_head = asked == Pipeline.ONE_PASS.value and few and case.mode.has_head and case.layout is not Layout.CHANNELS
    return f"{asked}, head" if is_head else asked


# The operands with a row for each row of x.
_ROWS = ("x", "residual", "dy", "gate", "keep", "cos", "sin")


def _draw(case: AnyCase, kinds: list[str], device: torch.device, seed: int) -> Tensors:
    """Return the operands of a call; rows of each kind follow one another."""
    n, count = case.n, case.rows_of_a_kind(device)
    dtype, m = TORCH_DTYPES[case.mode.dtype_in], len(kinds) * count

    def generator(name: str) -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name} {n} {case.mode.dtype_in}".encode()))

    def rows(name: str) -> torch.Tensor:
        return torch.cat([KINDS[kind].rows(count, n, dtype, generator(f"{name} {kind}")) for kind in kinds])

    def normal(name: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator(name), dtype=torch.float64, device=device)

    if isinstance(case, GroupCase):
        found = {"x": rows("x"), "weight": (1 + 0.1 * normal("weight", GROUPS * case.channels)).to(dtype)}
        if case.mode.is_backward:
            found["dy"] = torch.cat([normal(f"dy {kind}", count, n) for kind in kinds]).to(dtype)
        return found
    mode = case.mode
    # T5's and Llama's y has the type that weight and rounded row have together.
    is_of_y = mode.cast.comes_first and not mode.fquant.quantises
    weight_dtype = TORCH_DTYPES[mode.dtype_out] if is_of_y else dtype
    found = {"x": rows("x"), "weight": (1 + 0.1 * normal("weight", n)).to(weight_dtype)}
    if mode.fadd.adds:
        found["residual"] = rows("residual")
        if case.centres:
            # It would hide errors of what is small beside it: only calls that add have one.
            found["bias"] = (0.01 * normal("bias", n)).to(dtype)
    if mode.is_backward:
        found["dy"] = normal("dy", m, n).to(dtype)
    if mode.gating.gates:
        found["gate"] = (2 * normal("gate", m, n)).to(dtype)
    if case.layout is Layout.ROTATED:
        # One angle for all heads of a token.
        angles = normal("angles", m // ours.HEADS, n // 2).mul(10).repeat_interleave(ours.HEADS, 0)
        found |= {"cos": angles.cos().float(), "sin": angles.sin().float()}
    if mode.dropout:
        found["keep"] = dropout_mask((m, n), **ours.dropout(device))
    return found


# A kind of rows, the name of an output, ours, torch's, and what is exact.
Compared = tuple[str, str, torch.Tensor, torch.Tensor, Exact]


def _compared(case: AnyCase, device: torch.device, seed: int) -> Iterator[Compared]:
    mode = case.mode
    kinds = [name for name, kind in KINDS.items() if TORCH_DTYPES[mode.dtype_in] in kind.dtypes]
    if device.type == "cpu" and DType.BF16 in (mode.dtype_in, mode.dtype_out):
        kinds.remove("denormal")  # Triton's interpreter reads and writes bf16 below the smallest normal number wrongly
    given, count = _draw(case, kinds, device, seed), case.rows_of_a_kind(device)
    half = None if isinstance(case, GroupCase) else _first_rounded_to(case.mode)
    whole = None if mode.is_backward or isinstance(mode, GroupMode) else ours.forward(case, given)
    for index, kind in enumerate(kinds):
        part = slice(index * count, (index + 1) * count)
        rows = {name: tensor[part] if name in _ROWS else tensor for name, tensor in given.items()}
        if mode.is_backward:
            yield from ((kind, *each) for each in _gradients(case, rows, half))
            continue
        if "keep" in rows:
            rows["x"] = dropped(rows["x"].float(), rows["keep"])
        actual = ours.forward(case, rows) if whole is None else {name: each[part] for name, each in whole.items()}
        if isinstance(case, Case) and mode.fadd.renorms:
            # The second norm is given the sum as ours stores it.
            sums = (side.forward(case.behind, rows, half)["y"] for side in (peer, exact))
            yield kind, "residual_out", rows.setdefault("total", actual["residual_out"]), *sums
        theirs = peer.forward(case, rows, half)
        for name, wanted in exact.forward(case, rows, half).items():
            yield kind, name, actual[name], theirs[name], wanted


def _first_rounded_to(mode: Mode) -> torch.dtype | None:
    """Return the 16-bit type that rows are rounded to before the weight, if they are: y's, or else x's."""
    return rounded_to(mode.cast, TORCH_DTYPES[mode.dtype_out], TORCH_DTYPES[mode.dtype_in])


def _gradients(
    case: AnyCase, rows: Tensors, half: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, Exact]]:
    """Both are given the same statistics: fp64's, rounded to fp32 as a forward call saves them."""
    of_rows = statistics(exact.normalised(case, rows), EPS, centres=case.centres, averages=case.averages)
    mean, rstd = (each[:, 0].float() for each in of_rows)
    saved = {"rstd": rstd} | ({"mean": mean} if case.centres else {})
    theirs, wanted = peer.backward(case, rows, saved, half), exact.backward(case, rows, saved, half)
    if "keep" in rows:
        # Of a call's rows, which are these alone.
        theirs["ddropped"] = dropped(theirs["dx"], dropout_mask(rows["x"].shape, **ours.dropout(rows["x"].device)))
    for name, our in ours.backward(case, rows, saved).items():
        yield name, our, theirs[name], wanted[name]

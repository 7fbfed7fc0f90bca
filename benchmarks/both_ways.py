"""Norms and gradients quantised along rows and along columns, beside a copy of as many bytes, and casts behind either.

The block of `examples/fp8_block.py` is timed forward and backward: with one kernel, with a norm and a cast, in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import normforge

from .cells import Method
from .chosen import RESULTS, matching
from .environment import describe, folder_name, machine_here
from .errors import UsageError
from .results import write
from .timing import Call, measure, summarise

SUITE = "both-ways"

_E4M3: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "columnwise": "transposed"}
_FORMS: dict[str, dict[str, Any]] = {
    "fp8": _E4M3 | {"group_size": 128},
    "mxfp8": _E4M3 | {"group_size": 32, "scale_format": "ue8m0", "scale_layout": "swizzled_128x4"},
    "whole": _E4M3 | {"group_size": 0},
}
# The columns of a table that are times over normforge's.
_RATIOS = {"share": "copy", "ratio": "casts"}


class Cell(NamedTuple):
    """A call that is timed by the ways that `_WAYS` has under `way`, and its sizes."""

    way: str
    form: str
    norm: str
    add: bool
    m: int
    n: int

    @property
    def id(self) -> str:
        """Return the cell's name."""
        return "-".join([self.way, self.form, self.norm, *["add"] * self.add, f"{self.m}x{self.n}"])


def _quantise(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of a row, or the whole row for 0; MXFP8's groups of 32 have powers of two as scales."""
    groups = rows.float().reshape(len(rows), -1, size or rows.shape[1])
    scale = groups.abs().amax(-1).clamp(min=1e-30) / 448.0
    scale = torch.exp2(scale.log2().ceil()) if size == 32 else scale
    return (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2).contiguous(), scale


@cache
def _cast(size: int, *_: int) -> Callable[[torch.Tensor], Any]:
    """Compile, for one shape, a cast to groups of columns, and of the transpose to groups of rows."""
    # Otherwise the shapes before count, and the last ones are not compiled.
    torch.compiler.reset()
    return torch.compile(lambda y: (*_quantise(y, size), *_quantise(y.t(), size)), dynamic=False)


def _copy(x: torch.Tensor, size: int) -> Call:
    """Return a copy that reads `size` bytes per element of x, and writes as many."""
    source, target = torch.empty(2, x.numel() * size, dtype=torch.uint8, device=x.device)
    return partial(target.copy_, source)


def _forward(cell: Cell, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Mapping[str, Call]:
    """Time rows alone as well."""
    given: dict[str, Any] = {"residual": residual} if cell.add else {}
    ours = partial(getattr(normforge, f"quantised_{cell.norm}_norm"), x, weight, **given, **_FORMS[cell.form])
    norm = getattr(normforge, f"{cell.norm}norm2d_fwd")
    plain = partial(norm, x, weight, **given, fadd="pre_add_store" if cell.add else "none")
    cast = _cast(_FORMS[cell.form]["group_size"], *x.shape)
    return {
        "normforge": ours,
        "rows_alone": partial(ours, columnwise="none"),
        "copy": _copy(x, 4 if cell.add else 2),
        "casts": lambda: cast(plain().y),
    }


def _backward(cell: Cell, x: torch.Tensor, dresidual: torch.Tensor, weight: torch.Tensor) -> Mapping[str, Call]:
    """Time dx alone as well, in 16 bits, of a dy in 16 bits and of one in fp8 with scales of groups."""
    name, form, dy = f"{cell.norm}norm2d", _FORMS[cell.form], torch.randn_like(x)
    saved = getattr(normforge, f"{name}_fwd")(x, weight, save_mv=True)
    given = {"x": x, "weight": weight, "rstd": saved.rstd}
    given |= {"mean": saved.mean} if cell.norm == "layer" else {}
    given |= {"dresidual_out": dresidual} if cell.add else {}
    plain = partial(getattr(normforge, f"{name}_bwd"), **given, wants=("dx", "dweight"))
    narrow, scale = _quantise(dy, form["group_size"])
    scale = scale.to(torch.float8_e8m0fnu) if cell.form == "mxfp8" else scale
    cast = _cast(form["group_size"], *x.shape)
    return {
        "normforge": partial(getattr(normforge, f"quantised_{name}_bwd"), dy, **given, **form, wants=("dweight",)),
        "dx_alone": partial(plain, dy),
        "dx_of_fp8_dy": partial(plain, narrow, dy_scale=scale),
        "copy": _copy(x, 5 if cell.add else 4),
        "casts": lambda: cast(plain(dy).dx),
    }


def _step(_: Cell, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Mapping[str, Call]:
    """Time the example's block, whose casts of gradients and of the projection are compiled for every way."""
    block: Any = import_module("examples.fp8_block")
    block.quantise = torch.compile(block.quantise, dynamic=False)
    cast = torch.compile(lambda y: (*block.quantise(y), *block.quantise(y.t())), dynamic=False)

    def apart(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, **_: Any) -> normforge.ColumnwiseOutput:
        made = normforge.rmsnorm2d_fwd(x, weight, residual=residual, fadd="pre_add_store", save_mv=True)
        y, scale, columns, scales = cast(made.y)
        return normforge.ColumnwiseOutput(y, made.residual_out, scale, None, columns, scales, None, None, made.rstd)

    grads = torch.randn_like(x), torch.randn_like(x)
    operands = [x, residual, weight.float(), torch.randn(x.shape[1], x.shape[1], device=x.device).bfloat16()]
    operands = [each.requires_grad_() for each in operands]

    def step(way: Callable[..., Any], *others: Any) -> Any:
        return torch.autograd.grad(way(*operands, *others), operands, grads)

    ways = {"normforge": (block.NormLinear.apply,), "casts": (block.NormLinear.apply, apart), "bf16": (block.in_bf16,)}
    return {name: partial(step, *way) for name, way in ways.items()}


# The calls of a cell by the column of their times, and the ending of the table's name.
_WAYS = {"step": (_step, "-step"), "fwd": (_forward, ""), "bwd": (_backward, "-bwd")}


def both_ways(options: argparse.Namespace, _: list[str]) -> int:
    """Time all cells or those of `--only`, and write their tables."""
    machine = machine_here()
    out: Path = options.out or RESULTS / f"{folder_name(machine)}-both-ways"
    header, most = describe(machine, (), options.revision), options.rows or 1 << 14
    sizes = [sorted({min(size, most) for size in each}) for each in ((4096, 16384), (2048, 4096, 8192))]
    kinds = product(product(*sizes), _FORMS, ("fwd", "bwd"), ("rms", "layer"), (False, True))
    cells = [Cell("step", "fp8", "rms", True, sizes[0][-1], min(4096, most))]
    # dx has scales of groups alone.
    cells += [Cell(way, f, *kind, *size) for size, f, way, *kind in kinds if (way, f) != ("bwd", "whole")]
    chosen, tables = matching(cells, options.only), dict[str, list[dict[str, Any]]]()
    if not chosen:
        raise UsageError(f"--only {' '.join(options.only)} matches no cell; ids are such as {cells[-1].id}")
    for cell in chosen:
        x, other = torch.randn(2, cell.m, cell.n, device=machine.device).bfloat16()
        calls, ending = _WAYS[cell.way]
        ways = calls(cell, x, other, torch.rand(cell.n, device=machine.device).bfloat16() + 0.5)
        us = {name: summarise(measure(Method.COLD, [ways[name]], machine.device, 50.0)).median for name in ways}
        ratios = {name: us[other] / us["normforge"] for name, other in _RATIOS.items() if other in us}
        rows = tables.setdefault(ending, [])
        rows.append(cell._asdict() | us | ratios)
        print(*rows[-1].values(), flush=True)
        write(out, SUITE + ending, header, rows[-1], rows)
    return 0

"""Norms quantised along rows and along columns, beside a copy of as many bytes, and a norm with a cast behind it.

The block of `examples/fp8_block.py` is timed forward and backward: with one kernel, with a norm and a cast, in bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

import normforge

from .cells import Method
from .chosen import RESULTS
from .environment import describe, folder_name, machine_here
from .results import save_rows
from .timing import measure, summarise

SUITE = "both-ways"

_E4M3: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "columnwise": "transposed"}
_FORMS: dict[str, dict[str, Any]] = {
    "fp8": _E4M3 | {"group_size": 128},
    "mxfp8": _E4M3 | {"group_size": 32, "scale_format": "ue8m0", "scale_layout": "swizzled_128x4"},
}


@dataclass(frozen=True)
class Row:
    """Microseconds of a call, of rows alone, of a copy and of a norm and a compiled cast; and the copy's share."""

    form: str
    norm: str
    add: bool
    m: int
    n: int
    normforge: float
    rows_alone: float
    copy: float
    norm_and_cast: float
    share: float


def _cast(y: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Quantise y by groups of columns, and its transpose by groups of rows."""
    return *_quantise(y, size), *_quantise(y.t(), size)


def _quantise(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups of a row; MXFP8's groups of 32 have powers of two as scales."""
    groups = rows.float().reshape(len(rows), -1, size)
    scale = groups.abs().amax(-1).clamp(min=1e-30) / 448.0
    scale = torch.exp2(scale.log2().ceil()) if size == 32 else scale
    return (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2).contiguous(), scale


@dataclass(frozen=True)
class Step:
    """Microseconds of the block's step in fp8, with casts apart and in bf16, and the time with casts in that in fp8."""

    m: int
    n: int
    normforge: float
    casts: float
    bf16: float
    ratio: float


def _time_step(m: int, n: int, device: torch.device) -> Step:
    """Time the example's block, whose casts of gradients and of the projection are compiled for every way."""
    block: Any = import_module("examples.fp8_block")
    block.quantise = torch.compile(block.quantise, dynamic=False)
    cast = torch.compile(lambda y: (*block.quantise(y), *block.quantise(y.t())), dynamic=False)

    def apart(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, **_: Any) -> normforge.ColumnwiseOutput:
        made = normforge.rmsnorm2d_fwd(x, weight, residual=residual, fadd="pre_add_store", save_mv=True)
        y, scale, columns, scales = cast(made.y)
        return normforge.ColumnwiseOutput(y, made.residual_out, scale, None, columns, scales, None, None, made.rstd)

    x, residual, dout, dtotal = torch.randn(4, m, n, device=device).bfloat16()
    projection = torch.randn(n, n, device=device).bfloat16()
    operands = [each.requires_grad_() for each in (x, residual, torch.ones(n, device=device), projection)]

    def step(way: Callable[..., Any], *others: Any) -> Any:
        return torch.autograd.grad(way(*operands, *others), operands, (dout, dtotal))

    ours, casts = _us(device, step, block.NormLinear.apply), _us(device, step, block.NormLinear.apply, apart)
    return Step(m, n, ours, casts, _us(device, step, block.in_bf16), casts / ours)


def _us(device: torch.device, call: Callable[..., Any], *args: Any, **named: Any) -> float:
    return summarise(measure(Method.COLD, [partial(call, *args, **named)], device, 50.0)).median


def both_ways(options: argparse.Namespace, _: list[str]) -> int:
    """Time all cells, and write the table."""
    machine = machine_here()
    out: Path = options.out or RESULTS / f"{folder_name(machine)}-both-ways"
    header, most = describe(machine, (), options.revision), options.rows or 1 << 14
    sizes = [sorted({min(size, most) for size in each}) for each in ((4096, 16384), (2048, 4096, 8192))]
    step = _time_step(sizes[0][-1], min(4096, most), machine.device)
    print(*asdict(step).values(), flush=True)
    save_rows(out, f"{SUITE}-step", header, Step, [step])
    rows = []
    for (m, n), form, norm, add in product(product(*sizes), _FORMS, ("rms", "layer"), (False, True)):
        if (norm, add) == ("rms", False):
            # Otherwise the shapes before count, and the last ones are not compiled.
            torch.compiler.reset()
            cast = torch.compile(partial(_cast, size=_FORMS[form]["group_size"]), dynamic=False)
        x, residual = torch.randn(2, m, n, device=machine.device).bfloat16()
        weight = torch.rand(n, device=machine.device).bfloat16() + 0.5
        given: dict[str, Any] = {"residual": residual} if add else {}
        quantised: Callable[..., Any] = getattr(normforge, f"quantised_{norm}_norm")
        fadd, function = "pre_add_store" if add else "none", getattr(normforge, f"{norm}norm2d_fwd")
        plain: Callable[..., Any] = partial(function, x, weight, **given, fadd=fadd)
        source, target = torch.empty(2, m * n * (4 if add else 2), dtype=torch.uint8, device=machine.device)
        ours = _us(machine.device, quantised, x, weight, **given, **_FORMS[form])
        alone = _us(machine.device, quantised, x, weight, **given, **(_FORMS[form] | {"columnwise": "none"}))
        copy = _us(machine.device, target.copy_, source)
        apart = _us(machine.device, lambda cast, plain: cast(plain().y), cast, plain)
        rows.append(Row(form, norm, add, m, n, ours, alone, copy, apart, copy / ours))
        print(*asdict(rows[-1]).values(), flush=True)
        save_rows(out, SUITE, header, Row, rows)
    return 0

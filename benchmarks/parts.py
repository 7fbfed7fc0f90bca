"""The host's share of calls: microseconds of eager calls of normforge and of torch.

A round is 50 calls of one function, after the GPU has been waited for. Every function has its round in turn, many times
over, so that a slow minute of the machine hits all alike. A call of nothing is taken off each.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch.nn import functional as F

import normforge

from .cells import Cell, Norm, Task
from .chosen import RESULTS
from .environment import describe, folder_name, machine_here, revision_of
from .inputs import Inputs, make_inputs
from .progress import progress_over
from .results import save_rows
from .second_tree import load_tree
from .timing import Call, summarise

SUITE = "parts"
# The groups of calls.
WHOLE, BESIDE = "whole calls", "whole calls, of the tree beside"

_CALLS, _FEWEST_PASSES = 50, 5
# The interpreter takes some 10 ms a call, and its times mean nothing.
_INTERPRETED_CALLS, _INTERPRETED_PASSES = 1, 2
_SHAPE, _INTERPRETED_SHAPE = (16, 4096), (2, 64)


class Part(NamedTuple):
    """One function to time.

    Attributes:
        group: `WHOLE` or `BESIDE`.
        name: what it does.
        call: the function.
    """

    group: str
    name: str
    call: Call


def nothing() -> None:
    """Do nothing. The time of an empty call is part of every figure until it is subtracted."""


NOTHING = Part("", "a call of nothing", nothing)

# Microseconds a call, pass by pass.
Times = list[float]


@dataclass(frozen=True)
class Row:
    """One function, less a call of nothing, column by column.

    Attributes:
        group: `WHOLE` or `BESIDE`.
        part: its name.
        us: the median of the passes in microseconds.
        us_p20: their 20th percentile.
        us_min: the least of them.
        passes: how many there were.
    """

    group: str
    part: str
    us: float
    us_p20: float
    us_min: float
    passes: int


def parts(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb: measure, print a table, and write `parts.csv`.

    Raises:
        UsageError: there is no device, or no other tree where one is named.
    """
    machine = machine_here()
    interpreted = machine.interpreted
    shape = _INTERPRETED_SHAPE if interpreted else _SHAPE
    header = describe(machine, (), options.revision)
    header["shape"] = "×".join(map(str, shape))
    inputs = make_inputs(Cell(Task.ADD_QUANT, Norm.LAYER, *shape, out_dtype="int8", smooth=True), machine.device)
    calls, fewest = (_INTERPRETED_CALLS, _INTERPRETED_PASSES) if interpreted else (_CALLS, _FEWEST_PASSES)
    found = [Part(WHOLE, name, call) for name, call in (_torch_calls(inputs) | whole_calls(inputs, normforge)).items()]
    with tempfile.TemporaryDirectory() as scratch:
        if options.beside:
            header["beside"] = options.beside_revision or revision_of(options.beside)
            tree = load_tree(options.beside, Path(scratch))
            found += [Part(BESIDE, name, call) for name, call in whole_calls(inputs, tree).items()]
        rows = summarised(measure(found, calls, options.seconds, fewest))
    save_rows(options.out or RESULTS / folder_name(machine), SUITE, header, Row, rows)
    headers = ["µs on the host", "", "median", "20th percentile", "least"]
    shown = [(row.group, row.part, row.us, row.us_p20, row.us_min) for row in rows]
    print(tabulate(shown, headers, tablefmt="github", floatfmt=".2f"))
    return 0


def measure(found: Sequence[Part], calls: int, seconds: float, fewest: int) -> dict[Part, Times]:
    """Time every part and a call of nothing in turn, in as many passes as the time holds.

    Args:
        found: what to time.
        calls: in a round.
        seconds: for all passes together.
        fewest: passes, whatever they take.

    Returns:
        Microseconds a call in each pass.
    """
    every = (*found, NOTHING)
    # The first fills caches, the allocator's among them, the second says how long one takes; neither counts.
    _one_pass(every, calls)
    start = time.perf_counter()
    _one_pass(every, calls)
    passes = max(fewest, int(seconds / (time.perf_counter() - start)))
    times: dict[Part, Times] = {part: [] for part in every}
    for _ in progress_over(range(passes), what=SUITE, unit="pass"):
        for part, us in _one_pass(every, calls).items():
            times[part].append(us)
    return times


def summarised(times: dict[Part, Times]) -> list[Row]:
    """Return a row per part, without a call of nothing."""
    # Statistic by statistic: what interrupts one pass of nothing would leave less than nothing of another call.
    least = _statistics(times[NOTHING])
    rows = []
    for part, of_part in times.items():
        if part is not NOTHING:
            us, us_p20, us_min = (round(own - none, 3) for own, none in zip(_statistics(of_part), least, strict=True))
            rows.append(Row(part.group, part.name, us, us_p20, us_min, len(of_part)))
    return rows


def _one_pass(every: Sequence[Part], calls: int) -> dict[Part, float]:
    return {part: _round(part.call, calls) for part in every}


def _round(call: Call, calls: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    turns = range(calls)
    start = time.perf_counter()
    for _ in turns:
        call()
    return (time.perf_counter() - start) / calls * 1e6


def _statistics(times: Times) -> tuple[float, float, float]:
    spread = summarise(times)
    return spread.median, spread.p20, min(times)


def _torch_calls(inputs: Inputs) -> dict[str, Call]:
    x, weight, bias, _ = _operands(inputs)
    return {
        "F.layer_norm": lambda: F.layer_norm(x, (inputs.cell.n,), weight, bias, inputs.eps),
        **_recordable(inputs, "F.layer_norm", F.layer_norm),
    }


def whole_calls(inputs: Inputs, library: Any) -> dict[str, Call]:
    """Return calls of every family of a library, plain, quantised and recorded."""
    x, weight, bias, residual = _operands(inputs)
    forward, eps = library.layernorm2d_fwd, inputs.eps
    added: dict[str, Any] = {"eps": eps, "residual": residual, "fadd": "pre_add_store"}
    quantised = {"smooth_scale": inputs.smooth_scale, "fquant": "smooth_dynamic", "out_dtype": inputs.out_dtype}
    return {
        "layernorm2d_fwd": lambda: forward(x, weight, bias, eps=eps),
        "layernorm2d_fwd, residual added": lambda: forward(x, weight, bias, **added),
        "layernorm2d_fwd, residual added, smooth int8": lambda: forward(x, weight, bias, **added, **quantised),
        **_recordable(inputs, "layer_norm", library.layer_norm),
        **_family_calls(inputs, library),
    }


def _family_calls(inputs: Inputs, library: Any) -> dict[str, Call]:
    """Make a call of each other family, without a gradient, and recorded where the family has gradients."""
    x, weight, bias, residual = _operands(inputs)
    # Two samples of M / 2 rows where they divide (kernels for gradients take 8 rows or more), and eight groups.
    samples = math.gcd(2, len(x))
    rows, images = x.view(samples, -1, inputs.cell.n), x.view(len(x), 16, -1)
    scale, shift = weight.expand(samples, -1).contiguous(), bias.expand(samples, -1).contiguous()
    families: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "add_layer_norm": (library.add_layer_norm, (x, residual, weight, bias)),
        "add_layer_norm, dropout": (
            partial(library.add_layer_norm, dropout_p=0.1, dropout_rng=(1, 2)),
            (x, residual, weight, bias),
        ),
        "modulated_layer_norm": (library.modulated_layer_norm, (rows, scale, shift)),
        "gated_rms_norm": (library.gated_rms_norm, (x, residual, weight)),
        "group_norm": (
            lambda x, *vectors: library.group_norm(x, 8, *vectors),
            (images, *(vector[:16].contiguous() for vector in (weight, bias))),
        ),
    }
    calls: dict[str, Call] = {"quantised_rms_norm": lambda: library.quantised_rms_norm(x, weight)}
    for name, (function, operands) in families.items():
        calls[name] = partial(function, *operands)
        calls |= _recorded(name, function, operands)
    return calls


def _recordable(inputs: Inputs, name: str, function: Callable[..., torch.Tensor]) -> dict[str, Call]:
    def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return function(x, (inputs.cell.n,), weight, bias, inputs.eps)

    return _recorded(name, normalise, _operands(inputs)[:3])


def _recorded(name: str, function: Callable[..., Any], operands: Sequence[torch.Tensor]) -> dict[str, Call]:
    """Make a call that autograd records, its backward pass, and both together."""
    leaves = [operand.detach().requires_grad_() for operand in operands]

    def run() -> torch.Tensor:
        made = function(*leaves)
        y: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return y

    y = run()
    dy = torch.randn_like(y)
    return {
        f"{name}, recorded": run,
        f"{name}, forward and backward": lambda: torch.autograd.grad(run(), leaves, dy),
        f"{name}, backward alone": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
    }


def _operands(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    assert inputs.bias is not None
    assert inputs.residual is not None
    return inputs.x, inputs.weight, inputs.bias, inputs.residual

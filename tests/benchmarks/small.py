"""Small suites, providers and results to try the benchmark with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import Cell, Method, Norm, Suite, Task
from benchmarks.inputs import Inputs
from benchmarks.provider import Prepared, Provider, named
from benchmarks.results import OK, Results, load, make_row
from benchmarks.runner import Plan
from benchmarks.timing import Spread

from ..calling import there

HEADER = {"device": "a test", "revision": "none"}
CELLS = tuple(Cell(Task.FORWARD, Norm.LAYER, 3, n, group="small") for n in (64, 128))
SUITE = Suite("forward", "Forward", Method.COLD, CELLS)


def torch_norm(inputs: Inputs) -> torch.Tensor:
    """What a right provider returns for a plain LayerNorm."""
    return torch.nn.functional.layer_norm(inputs.x, inputs.weight.shape, inputs.weight, inputs.bias, inputs.eps)


def provider(name: str, result: Callable[[Inputs], torch.Tensor]) -> Provider:
    """A provider of plain LayerNorms that returns `result(inputs)`."""

    def build(inputs: Inputs) -> Prepared:
        return Prepared(lambda: result(inputs), named("y"))

    return Provider(name, name, ("torch",), {(Task.FORWARD, Norm.LAYER): build})


def fails(inputs: Inputs) -> torch.Tensor:
    """What a provider without a kernel does."""
    raise RuntimeError("\nno kernel for this shape\nand a long story")


def plan(out: Path, *providers: Provider, **options: Any) -> Plan:
    """A plan of one short round on the CPU."""
    return Plan(torch.device("cpu"), {each.name: each for each in providers}, out, 1.0, 1, **options)


def results(suite: str, *figures: tuple[Cell, str, float]) -> Results:
    """Results of given times in microseconds; a time of 0 is a failure."""
    made = Results(suite, dict(HEADER))
    for cell, name, us in figures:
        spread = Spread(us, us, us, 1) if us else None
        made.add(make_row(cell, name, OK if us else "fails: RuntimeError: no such kernel", spread))
    return made


def loaded(folder: Path, suite: str = "forward") -> Results:
    """Results that a folder has to hold."""
    return there(load(folder, suite))

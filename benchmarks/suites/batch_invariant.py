"""The cost of batch invariance for few rows, under CUDA graphs: its tile is for many rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from ..cells import Cell, Method, Norm, Suite, Task

# The provider of the same calls under batch invariance.
PROVIDER = "normforge-batch-invariant"

FEW, MANY = "few rows", "many rows"
# Every kind of kernel, and what its cells are called.
_TASKS = {
    Task.FORWARD: "forward",
    Task.ADD: "add",
    Task.QUANT: "quant",
    Task.ADD_QUANT: "add + quant",
    Task.BACKWARD: "backward",
}


def group_of(rows: str, task: Task) -> str:
    """Return the part of the two suites that holds cells of a task, with few rows or many."""
    return f"batch invariance, {rows}, {_TASKS[task]}"


# This suite and `batch_invariant_many`: all that the provider is for.
GROUPS = tuple(group_of(rows, task) for rows, task in product((FEW, MANY), _TASKS))


def cells_of(
    rows: str, lengths: Mapping[Task, tuple[int, ...]], ms: tuple[int, ...], most: int = 1 << 62
) -> tuple[Cell, ...]:
    """Both norms' cells of every length of a task with every number of rows, as many as make up to `most` elements."""
    return tuple(
        Cell(
            task,
            norm,
            min(m, most // n),
            n,
            out_dtype="fp8" if task.quantises else "",
            group=group_of(rows, task),
        )
        for task in _TASKS
        for norm, n, m in product(Norm, lengths[task], ms)
    )


# Each length by itself has a tile, and so a cost; what is fused shows at two of them whether it costs more.
_WIDTHS = (4096, 8192)
_LENGTHS = dict.fromkeys(_TASKS, _WIDTHS) | {Task.FORWARD: (1024, 4096, 4099, 8192, 16384, 65536)}

SUITE = Suite(
    "batch-invariant",
    "Batch invariance, few rows",
    Method.GRAPH,
    cells_of(FEW, _LENGTHS, (1, 16, 256)),
    along="m",
    unit="µs",
)

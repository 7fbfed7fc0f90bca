"""Kernels of a model's step: their owners, and the bytes that they moved, as Nsight Compute counts them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from ..errors import UsageError
from ..results import load_rows, save_rows
from .table import title_of

SUITE = "kernels"

# Nsight Compute's: bytes that crossed the DRAM's pins, and how long a kernel ran.
BYTES, NANOSECONDS = "dram__bytes.sum", "gpu__time_duration.sum"
METRICS = (BYTES, NANOSECONDS)

# The kernel of `torch.cuda._sleep`, which no model launches: it marks the start of each profiled step.
MARK = "spin_kernel"

OTHER = "other"


class Group(NamedTuple):
    """Kernels of one kind.

    Attributes:
        owner: who wrote or generated them.
        what: what they compute.
        names: a pattern that is searched in a kernel's name.
    """

    owner: str
    what: str
    names: str


# The first that matches counts. Eager torch computes a written-out RMSNorm by kernels that its other elementwise
# operators share, so that only the difference of two variants tells its norms from the rest.
GROUPS = (
    Group("normforge", "norms", r"^(ln|rms)_(fwd|bwd)_|^sum_partials$"),
    Group(
        "Liger", "norms, rotary, SwiGLU, loss", r"^_(rms_norm|layer_norm|triton_rope|(sw|ge)i?glu|liger|element_mul)"
    ),
    Group("Inductor", "norms with their neighbours", r"^triton_.*(rsqrt|native_layer_norm|rms_norm|mean_pow|var_mean)"),
    Group("Inductor", "the loss", r"^triton_.*(log_softmax|nll_loss|logsumexp)"),
    Group("Inductor", "elementwise and sums", r"^triton_"),
    Group("cuDNN, FlashAttention", "attention", r"flash|fmha|sdpa|attention"),
    Group("cuBLAS", "matrix products", r"gemm|cutlass|nvjet|xmma|cublas|splitK|gemv"),
    Group("torch", "norms", r"layer_?norm|LayerNorm|GammaBeta|rms_?norm|RowwiseMoments"),
    Group("torch", "the loss", r"[Ss]oft[Mm]ax|nll_loss"),
    Group("torch", "embeddings, copies of memory", r"embedding|scatter|index|[Mm]emcpy|[Mm]emset|CatArray"),
    Group("torch", "elementwise and sums", r"elementwise|reduce_kernel|at::native"),
)


class Launch(NamedTuple):
    """A kernel that ran.

    Attributes:
        name: its function.
        nanoseconds: how long it ran, alone on the GPU.
        bytes: what it moved between the chip and its DRAM.
    """

    name: str
    nanoseconds: float
    bytes: float


@dataclass(frozen=True)
class Row:
    """The kernels of one group in one step.

    Attributes:
        model: a name of `SPECS`.
        dtype: `bf16`, or `autocast`.
        step: `train` or `decode`.
        run: `eager` or `compile`.
        variant: a name of `VARIANTS`.
        owner: whose they are.
        what: what they compute.
        launches: how many ran.
        ms: what they took together, one at a time.
        gb: what they moved, in 10⁹ bytes.
        largest: the name of the one that took most.
    """

    model: str
    dtype: str
    step: str
    run: str
    variant: str
    owner: str
    what: str
    launches: int
    ms: float
    gb: float
    largest: str


_LONGEST_NAME = 70


def group_of(name: str) -> tuple[str, str]:
    """Whose a kernel is, and what it computes."""
    for group in GROUPS:
        if re.search(group.names, name):
            return group.owner, group.what
    return OTHER, OTHER


def launches_in(text: str) -> list[list[Launch]]:
    """Parse what Nsight Compute printed as CSV of its raw page, in base units, split where `MARK` ran.

    Raises:
        UsageError: it printed no kernel, or lacks a metric.
    """
    # Lines of its own and of the program's stand between.
    lines = [line for line in text.splitlines() if line.startswith('"')]
    records = list(csv.DictReader(lines))
    missing = [name for name in ("Kernel Name", *METRICS) if not records or name not in records[0]]
    if missing:
        last = " / ".join(line for line in text.splitlines()[-3:] if line.strip())
        raise UsageError(f"Nsight Compute printed no {' and no '.join(missing)}; its last lines: {last}")
    parts: list[list[Launch]] = []
    for record in records:
        name = record["Kernel Name"]
        if MARK in name:
            parts.append([])
        # The first record states units.
        elif name and parts:
            parts[-1].append(Launch(name, _number(record[NANOSECONDS]), _number(record[BYTES])))
    return parts


def summed(about: Sequence[str], launches: Iterable[Launch]) -> list[Row]:
    """Return a row per group, the slowest first.

    Args:
        about: model, dtype, step, run and variant.
        launches: what ran.
    """
    groups: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        groups.setdefault(group_of(launch.name), []).append(launch)
    model, dtype, step, run, variant = about
    rows = [
        Row(
            model,
            dtype,
            step,
            run,
            variant,
            *group,
            len(found),
            round(sum(one.nanoseconds for one in found) / 1e6, 4),
            round(sum(one.bytes for one in found) / 1e9, 4),
            max(found, key=lambda one: one.nanoseconds).name[:_LONGEST_NAME],
        )
        for group, found in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.ms)


def save(folder: Path, header: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write `kernels.csv`."""
    save_rows(folder, SUITE, header, Row, rows)


def load(folder: Path) -> tuple[dict[str, str], list[Row]] | None:
    """Read what `save` wrote, or None where there is none."""
    return load_rows(folder, SUITE, Row)


def render(rows: Sequence[Row], models: Sequence[str]) -> str:
    """Return a table per model and step: the time and traffic of every variant's kernels, by group."""
    parts = []
    for model in models:
        own = [row for row in rows if row.model == model]
        for step, dtype in dict.fromkeys((row.step, row.dtype) for row in own):
            parts.append(_grid(model, [row for row in own if (row.step, row.dtype) == (step, dtype)]))
    return "\n\n".join(parts)


def _grid(model: str, rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys((row.run, row.variant) for row in rows))
    groups = [*((group.owner, group.what) for group in GROUPS), (OTHER, OTHER)]
    found = {(row.run, row.variant, row.owner, row.what): row for row in rows}
    lines = []
    for owner, what in groups:
        cells = [found.get((*column, owner, what)) for column in columns]
        if any(cells):
            lines.append((owner, what, *map(_cell, cells)))
    totals = [[row for row in rows if (row.run, row.variant) == column] for column in columns]
    lines.append(("", "all", *(_figures(own) for own in totals)))
    title = f"**Kernels of a {rows[0].step} step of {model}, {rows[0].dtype}**: ms, GB moved to and from DRAM, launches"
    headers = ["whose", "what", *(title_of(run, variant) for run, variant in columns)]
    return title + "\n\n" + tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def _cell(row: Row | None) -> str:
    return "–" if row is None else _figures([row])


def _figures(rows: Sequence[Row]) -> str:
    ms, gb, launches = (sum(getattr(row, name) for row in rows) for name in ("ms", "gb", "launches"))
    return f"{ms:.2f} ms, {gb:.2f} GB, {launches}"


def _number(text: str) -> float:
    return float(text.replace(",", ""))

"""All results of a card as one table of a page: a row per suite, task and norm, and a row per model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from .cells import Task
from .grids import Grid
from .models.names import AUTOCAST, BF16, COMPILE, DECODE, EAGER, GRAPHS, TRAIN
from .models.specs import SPECS
from .models.table import Table as Models
from .models.table import load as load_models
from .reach import Finding, Rule, check, mean_of
from .results import Results, load
from .suites import SUITES

# The section of a page that the table is put into.
SECTION = "overview"
_NONE = "–"
_HEADS = ("suite", "cells", "of a copy", "× torch", "× best peer")
# Suites whose norms have a row each. Pages give the host's times and the cost of batch invariance in sentences.
_BY_NORM = ("forward", "backward")
_LEFT_OUT = ("host", "batch-invariant", "batch-invariant-many")
# A row of fewer cells is left out beside longer rows of the suite: such figures are in the suite's CSV.
_FEWEST_CELLS = 5
# The titles of a model's steps, and the two variants whose times are compared.
_STEPS = {
    "train": (BF16, TRAIN, EAGER, "patch", "torch"),
    "train, beside Liger": (BF16, TRAIN, EAGER, "patch", "liger"),
    "train, autocast": (AUTOCAST, TRAIN, EAGER, "patch", "torch"),
    "train, compiled": (BF16, TRAIN, COMPILE, "patch-passes", "torch"),
    "decode": (BF16, DECODE, EAGER, "patch", "torch"),
    "decode, CUDA graph": (BF16, DECODE, GRAPHS, "patch-passes", "torch"),
}


def overview(folders: Sequence[Path]) -> list[Grid]:
    """Return the tables of some folders of results: of all suites, and of models; of a folder without either, none."""
    lines, made, suites = [], [], dict[str, list[str]]()
    for folder in folders:
        for suite in (name for name in SUITES if name not in _LEFT_OUT):
            if (results := load(folder, suite)) is not None:
                lines += _lines(results)
                suites.setdefault(results.header["revision"], []).append(suite)
    if lines:
        revisions = "; ".join(f"{', '.join(names)} at {revision}" for revision, names in suites.items())
        made.append(Grid("", _HEADS, lines, [f"Revisions: {revisions}."]))
    return made + [_models(table) for folder in folders if (table := load_models(folder)) is not None]


def _lines(results: Results) -> list[tuple[str, ...]]:
    tasks = [task.value for task in Task]
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in check(Rule("every cell", results.suite), results).findings:
        norm = f" {finding.row.norm}" if results.suite in _BY_NORM else ""
        groups.setdefault((finding.row.task, norm), []).append(finding)
    fewest = min(_FEWEST_CELLS, max(map(len, groups.values()), default=0))
    lines = [
        (
            _title(results.suite, task.replace("_", " "), norm),
            str(len(found)),
            _span(finding.to_copy for finding in found),
            _span(_over(results, finding, "eager") for finding in found),
            _span(finding.to_peer for finding in found),
        )
        for (task, norm), found in sorted(groups.items(), key=lambda group: tasks.index(group[0][0]))
        if len(found) >= fewest
    ]
    return [line for line in lines if {*line[2:]} != {_NONE}]


def _title(suite: str, task: str, norm: str) -> str:
    return f"{task}{norm}" if task.startswith(suite) else f"{suite}: {task}{norm}"


def _over(results: Results, finding: Finding, provider: str) -> float | None:
    row = results.of(finding.row.cell).get(provider)
    return row.us / finding.row.us if row is not None and row.ok and finding.row.ok else None


def _span(ratios: Iterable[float | None]) -> str:
    """Return the geometric mean of ratios, and from the least to the largest."""
    known = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    mean = mean_of(known)
    return _NONE if mean is None else f"{mean:.2f} ({min(known):.2f}–{max(known):.2f})"


def _models(table: Models) -> Grid:
    ms = {key: row.ms for key, row in table.rows.items() if row.ms}
    gains: dict[str, dict[str, float]] = {
        title: {
            key.model: ms[other] / time
            for key, time in ms.items()
            if tuple(key)[1:] == (dtype, step, run, ours) and (other := key._replace(variant=peer)) in ms
        }
        for title, (dtype, step, run, ours, peer) in _STEPS.items()
    }
    shown = {title: found for title, found in gains.items() if found}
    models = [model for model in SPECS if any(model in found for found in shown.values())]
    lines = [(model, *(_gain(found, model) for found in shown.values())) for model in models]
    lines.append(("geometric mean", *(f"{geometric_mean(found.values()):.3f}" for found in shown.values())))
    title = f"Speed of patched models over unpatched models, at {table.header['revision']}"
    return Grid(title, ("model", *shown), lines)


def _gain(found: Mapping[str, float], model: str) -> str:
    return f"{found[model]:.2f}" if model in found else _NONE

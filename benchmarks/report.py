"""Results as the README's tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import geometric_mean
from typing import Literal

from tabulate import tabulate

from .cells import Task
from .footnotes import failures, footnotes
from .providers import every_provider
from .results import CEILING, PROJECT, SEED, Results, Row
from .suites import SUITES, batch_invariant
from .swept import summary

WHAT = "benchmarks"


@dataclass(frozen=True)
class Table:
    """A choice of cells.

    Attributes:
        title: above the table.
        suite: whose cells.
        cells: a shell pattern of cell ids.
        groups: shell patterns of groups.
        unit: of the figures.
        lengths: which n, or empty for all.
        rows: which m, or empty for all.
        label: what a line is called, a format of a row's attributes; `{task}` is in words, `{shape}` the cell's own.
        turned: whether providers are lines, and cells columns.
        beside: a provider over whose speed the project's is said below the table, for all cells of the suite.
    """

    title: str
    suite: str
    cells: str
    groups: tuple[str, ...]
    unit: Literal["TB/s", "µs"] = "TB/s"
    lengths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    label: str = "{m}×{n}"
    turned: bool = False
    beside: str = ""

    def holds(self, row: Row) -> bool:
        """Return True if a row's cell is in the table."""
        named = fnmatch(row.cell, self.cells) and any(fnmatch(row.group, group) for group in self.groups)
        return named and row.n in (self.lengths or (row.n,)) and row.m in (self.rows or (row.m,))


# Kinds of the dtypes that stand beside bf16, not quantised; and of their lengths those that tables have.
_OTHER = "*_fp[13][62]*/*"
_OTHER_LENGTHS = (4096, 8192)
_FORWARD_LENGTHS = (1024, 4096, 5120, 8192, 16384, 32768, 65536, 131072)
_BACKWARD_LENGTHS = (1024, 4096, 5120, 8192, 16384, 32768)
_BACKWARD_GROUPS = ("256 MiB", "M = 4096")
_QUANT_LENGTHS = (1024, 4096, 16384)
_CK_TILE_LENGTHS = (80, 128, 256, 512, 1024, 1996, 4080)

_OF_GROUP = "{group}, {m}×{n}"
_OF_TASK = "{task}, {m}×{n}"
_OF_KIND = "{kind}, {m}×{n}"
_OF_KIND_AND_GROUP = "{kind}, {group}, {m}×{n}"
_ADDED, _ADDED_RMS = "add_quantised/*", "add_quantised/rms_*"

_TASKS = {
    Task.ADD_QUANT.value: "add + quant",
    Task.MODULE.value: "module, no_grad",
    Task.GRAD_FORWARD.value: "forward, recorded",
    Task.GRAD_BOTH.value: "forward and backward",
}

# Shown above tables, and what they show.
_PICTURES = {
    "forward.png": "Throughput of the forward pass over N",
    "steps-ratios.png": "Throughput of each step over that of a copy, by shape",
    "sweep.png": "Share of the copy's speed and lead over the best peer, by N and rows",
}

# A few lines of every suite: the README shows them all.
TABLES = (
    Table("LayerNorm, bf16", "forward", "*/ln_bf16/*", ("256 MiB",), lengths=_FORWARD_LENGTHS),
    Table("RMSNorm, bf16", "forward", "*/rms_bf16/*", ("256 MiB",), lengths=_FORWARD_LENGTHS),
    Table("LayerNorm, odd rows, bf16", "forward", "*/ln_*", ("odd rows",)),
    Table("fp16 and fp32", "forward", _OTHER, ("fp32", "256 MiB"), lengths=_OTHER_LENGTHS, label=_OF_KIND),
    Table("LayerNorm backward, bf16", "backward", "*/ln_bf16/*", _BACKWARD_GROUPS, lengths=_BACKWARD_LENGTHS),
    Table("RMSNorm backward, bf16", "backward", "*/rms_bf16/*", ("256 MiB",), lengths=_BACKWARD_LENGTHS),
    Table("fp16 and fp32, backward", "backward", _OTHER, ("fp32", "256 MiB"), lengths=_OTHER_LENGTHS, label=_OF_KIND),
    Table(
        "Residual add, LayerNorm, smooth fp8", "quant", "*/ln_bf16_fp8_sdq/*", ("add + quant",), lengths=_QUANT_LENGTHS
    ),
    Table(
        "Residual add, LayerNorm, smooth fp8, of fp16 and fp32",
        "quant",
        "*/ln_fp??_fp8_sdq/*",
        ("add + quant",),
        label=_OF_KIND,
    ),
    Table("ck_tile's default, fp16 to smooth int8", "quant", "*_sdq/*", ("ck_tile's default",), label=_OF_TASK),
    Table("Add and norm, fp8 in groups of 128", "quantised", _ADDED, ("groups",), rows=(16384,), label=_OF_KIND),
    Table("Add and RMSNorm, fp8", "quantised", _ADDED_RMS, ("*",), lengths=(4096,), rows=(16384,), label=_OF_GROUP),
    Table(
        "Add and RMSNorm, fp8, CUDA graph",
        "quantised-decode",
        _ADDED_RMS,
        ("groups", "a scale a row"),
        "µs",
        (4096,),
        label=_OF_GROUP,
    ),
    Table("fp8 in, bf16 out", "fp8-inputs", "*", ("*",), lengths=(4096,), label=_OF_KIND),
    Table("LayerNorm decode, CUDA graph", "decode", "*/ln_bf16/*", ("*",), "µs", (4096, 8192), (1, 16, 256)),
    Table("LayerNorm decode, fp16 and fp32, CUDA graph", "decode", "*/ln_fp*", ("*",), "µs", label=_OF_KIND),
    Table("RMSNorm of 32 of 48 heads, bf16", "heads", "*/rms_bf16_h*", ("*",), lengths=(128,), label=_OF_TASK),
    Table("RMSNorm of 32 of 48 heads, fp16 and fp32", "heads", "*/rms_fp??_h*", ("*",), label=f"{{task}}, {_OF_KIND}"),
    Table("Residual add and LayerNorm, with a dropout and without", "dropout", "*/ln_bf16/*", ("*",), label=_OF_GROUP),
    Table(
        "Residual add and LayerNorm, with a dropout and without, fp16 and fp32",
        "dropout",
        "*/ln_fp*",
        ("*",),
        lengths=(4096,),
        label=_OF_KIND_AND_GROUP,
    ),
    Table("Gated norms, bf16", "gated", "*_bf16*", ("*",), label=_OF_KIND_AND_GROUP),
    Table("Gated norms, fp16 and fp32", "gated", _OTHER, ("*",), lengths=(128,), label=_OF_KIND_AND_GROUP),
    Table("Modulated LayerNorm, bf16", "modulated", "*/ln_bf16*", ("*",), label=_OF_GROUP),
    Table("Modulated LayerNorm, fp16 and fp32", "modulated", "*/ln_fp??/*", ("*",), label=_OF_KIND_AND_GROUP),
    Table("GroupNorm and SiLU, bf16", "groupnorm", "group/gn_bf16_silu*", ("*",), label="{shape}, {group}"),
    Table(
        "GroupNorm and SiLU backward, bf16", "groupnorm", "group_backward/gn_bf16*", ("*",), label="{shape}, {group}"
    ),
    Table(
        "GroupNorm and SiLU, fp16 and fp32", "groupnorm", f"group/{_OTHER}", ("*",), label="{kind}, {shape}, {group}"
    ),
    Table(
        "LayerNorm, batch invariant and not, CUDA graph",
        "batch-invariant",
        "*/ln_*",
        ("*",),
        "µs",
        (4096,),
        label=_OF_TASK,
        beside=batch_invariant.PROVIDER,
    ),
    Table(
        "LayerNorm, batch invariant and not",
        "batch-invariant-many",
        "*/ln_*",
        ("*",),
        lengths=(4096, 4099, 65536),
        rows=(4096,),
        label=_OF_TASK,
        beside=batch_invariant.PROVIDER,
    ),
    Table(
        "LayerNorm of ck_tile's shapes, CUDA graph", "ck_tile", "*/ln_bf16/*", ("700 rows*",), "µs", _CK_TILE_LENGTHS
    ),
    Table(
        "Triton's tutorial, fp16",
        "tutorial",
        "*",
        ("*",),
        lengths=(1024, 4096, 15872),
        label=_OF_TASK,
        beside="tutorial05",
    ),
    Table("Forward, bf16", "steps", "forward/*", ("steps*",), turned=True),
    Table("Backward, bf16", "steps", "backward/*", ("steps*",), turned=True),
    Table("Host time of one LayerNorm call, 16×4096 bf16", "host", "*/ln_*", ("*",), "µs", label="{task}"),
)


def render(found: Sequence[Results], picture: str | None = None) -> str:
    """Return the tables of results, under a line that says where they were measured.

    Args:
        found: the suites there are.
        picture: the path of one to show, or None.
    """
    by_suite = {results.suite: results for results in found}
    parts = [_where(found)]
    if picture is not None:
        parts.append(f"![{_PICTURES[Path(picture).name]}]({picture})")
    for table in TABLES:
        if table.suite in by_suite:
            parts += _render(table, by_suite[table.suite])
    for results in found:
        if SUITES[results.suite].draw is not None:
            dtypes = dict.fromkeys(row.kind.split("_")[1] for row in results.rows.values())
            title = f"{SUITES[results.suite].title}, seed {results.seed}, {', '.join(dtypes)}"
            parts += [f"**{title}**", summary(results)]
            parts += failures(results.rows.values(), every_provider(), results.header)
    return "\n\n".join(parts)


def picture_for(readme: Path, results: Path, name: str | None = None) -> str | None:
    """Return the path of a README's one picture, relative to the README, or None if it was not drawn.

    Without a name, the first of those that tables are shown with.
    """
    paths = [results / each for each in (_PICTURES if name is None else (name,))]
    found = next((path for path in paths if path.exists()), None)
    return None if found is None else Path(os.path.relpath(found, readme.resolve().parent)).as_posix()


def where(header: Mapping[str, str]) -> str:
    """Return the line that says where and with which versions results were measured."""
    return f"Measured on {_line(header)}."


def _line(header: Mapping[str, str]) -> str:
    # A seed is a suite's own, and said above its table.
    stated = {key: value for key, value in header.items() if key != SEED}
    return ", ".join(value if key == "device" else f"{key} {value}" for key, value in stated.items())


def _where(found: Sequence[Results]) -> str:
    headers: dict[str, list[str]] = {}
    for results in found:
        headers.setdefault(_line(results.header), []).append(results.suite)
    if len(headers) == 1:
        return where(found[0].header)
    return "\n".join(f"- {', '.join(suites)}: measured on {line}." for line, suites in headers.items())


def _render(table: Table, results: Results) -> list[str]:
    cells = {row.cell: row for row in results.rows.values() if table.holds(row)}
    if not cells:
        return []
    measured = {name for cell in cells for name in results.of(cell)}
    providers = [(name, provider.label) for name, provider in every_provider().items() if name in measured]
    # A copy has nothing to say of a host's microseconds.
    providers = [one for one in providers if table.unit == "TB/s" or one[0] != CEILING]
    shown = {name: every_provider()[name] for name, _ in providers}
    marks, notes = footnotes([results.of(cell) for cell in cells], shown, results.header)
    lines = [
        (
            _label(table, row),
            *(_figure(table, results.of(cell).get(name)) + marks.get((cell, name), "") for name, _ in providers),
        )
        for cell, row in cells.items()
    ]
    heads = (table.unit, *(label for _, label in providers))
    if table.turned:
        heads, *lines = zip(heads, *lines, strict=True)
    align = ("left", *("right" for _ in heads[1:]))
    text = tabulate(lines, heads, tablefmt="github", disable_numparse=True, colalign=align)
    return [f"**{table.title}**", text, *_said_beside(table, results), *notes]


def _said_beside(table: Table, results: Results) -> list[str]:
    """How many times a peer's speed the project has, by task; nothing where the two were not timed together."""
    ratios: dict[str, list[tuple[int, float]]] = {}
    for cell in results.cells():
        rows = results.of(cell)
        own, peer = rows.get(PROJECT), rows.get(table.beside)
        if own is not None and peer is not None and own.ok and peer.ok:
            ratios.setdefault(own.task, []).append((own.n, peer.us / own.us))
    label = every_provider()[table.beside].label if ratios else ""
    spans = (
        f"{_TASKS.get(task, task)} {min(ratio for _, ratio in found):.2f} to {max(ratio for _, ratio in found):.2f}, "
        f"{geometric_mean(ratio for _, ratio in found):.2f} in the mean "
        f"(N from {min(found)[0]} to {max(found)[0]})"
        for task, found in ratios.items()
    )
    return [f"normforge over {label}, times the speed: {'; '.join(spans)}."] if ratios else []


def _label(table: Table, row: Row) -> str:
    shape = row.cell.rpartition("/")[2].replace("x", "×")
    return table.label.format(**asdict(row) | {"task": _TASKS.get(row.task, row.task), "shape": shape})


def _figure(table: Table, row: Row | None) -> str:
    if row is None:
        return "–"
    if not row.ok:
        return "fails"
    return f"{row.gb_per_s / 1e3:.2f}" if table.unit == "TB/s" else f"{row.us:.2f}"

"""The table of models: its rows, its files, and what is printed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean

from normforge.codegen.locking import locked

from ..grids import Grid
from ..results import OK, load_rows, require_header, save_rows
from .names import ABSENT, AUTOCAST, BF16, COMPILE, DECODE, EAGER, GRAPHS, NOTHING, SUITE, TRAIN, Key
from .specs import SPECS
from .variants import TORCH, VARIANTS

_STEPS = {TRAIN: "Training step", DECODE: "Decode step"}
_DTYPES = {BF16: "bf16", AUTOCAST: "fp32 under bf16 autocast"}
# The last line of a table of times.
_MEAN = "speed over torch's, geometric mean"
_RUNS = {EAGER: "{}", COMPILE: "{} + compile", GRAPHS: "{} + CUDA graph"}


@dataclass(frozen=True)
class Row:
    """One variant's step of one model.

    Attributes:
        model: a name of `SPECS`.
        dtype: `bf16`, or `autocast`: fp32 weights under bf16 autocast.
        step: `train` or `decode`.
        run: `eager`, `compile`, or `graphs`: torch.compile with CUDA graphs (mode="reduce-overhead").
        variant: a name of `VARIANTS`.
        status: `ok`; or `wrong`, `fails`, `not here` or `nothing to do`, a colon and why.
        ms: the median time of a step in milliseconds; None, as all that follows, where there is none.
        ms_p20: its 20th percentile.
        ms_p80: its 80th.
        runs: how many steps were timed.
        memory_gib: the most that was allocated on the device during a training step, with weights and gradients, and
            without what other variants keep there.
        loss: of the step checked.
        torch_loss: torch's eager model's.
        off: the largest distance from torch's eager model over the largest that nudges of the weights by a rounding
            make: of the loss or a parameter's gradient, or where it decodes of the logits or a layer's new keys or
            values. Above 1 is wrong.
        where: of what that is.
        note: where it compiles into several graphs, how many; and of how many torch made no CUDA graph.
    """

    model: str
    dtype: str
    step: str
    run: str
    variant: str
    status: str
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    runs: int | None = None
    memory_gib: float | None = None
    loss: float | None = None
    torch_loss: float | None = None
    off: float | None = None
    where: str = ""
    note: str = ""

    @property
    def key(self) -> Key:
        """Return the subject of the row."""
        return Key(self.model, self.dtype, self.step, self.run, self.variant)

    @property
    def ok(self) -> bool:
        """Return True if there is a time."""
        return self.status == OK

    @property
    def final(self) -> bool:
        """Return True if the row need not be run again: all rows but those that lack a package."""
        return not self.status.startswith(ABSENT)


@dataclass
class Table:
    """Rows under the header they share."""

    header: dict[str, str]
    rows: dict[Key, Row] = field(default_factory=dict)

    def due(self, keys: Iterable[Key]) -> list[Key]:
        """Return the keys that have no final row."""
        return [key for key in keys if key not in self.rows or not self.rows[key].final]

    def save(self, folder: Path) -> None:
        """Write `models.csv`; a reader finds the old file or the new one."""
        save_rows(folder, SUITE, self.header, Row, self.rows.values())


def extend(folder: Path, header: Mapping[str, str], rows: Iterable[Row]) -> Table:
    """Add rows to the table in a folder, which other processes may be adding to.

    Raises:
        UsageError: as `load` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{SUITE}.lock"):
        table = load(folder, header) or Table(dict(header))
        table.rows |= {row.key: row for row in rows}
        # Whichever process was the first to end.
        order = {name: place for place, name in enumerate(SPECS)}
        table.rows = dict(sorted(table.rows.items(), key=lambda item: order.get(item[0].model, len(order))))
        table.save(folder)
    return table


def load(folder: Path, header: Mapping[str, str] | None = None) -> Table | None:
    """Read a table, or None where there is none.

    Raises:
        UsageError: the file is none of these, or its header is not the given one.
    """
    found = load_rows(folder, SUITE, Row)
    if found is None:
        return None
    if header is not None:
        require_header(folder / f"{SUITE}.csv", found[0], header)
    return Table(found[0], {row.key: row for row in found[1]})


def tables_of(table: Table) -> list[Grid]:
    """Return milliseconds by step and dtype, and the memory of training steps."""
    made = []
    for step, dtype in [(step, dtype) for step in _STEPS for dtype in _DTYPES]:
        rows = [row for row in table.rows.values() if (row.step, row.dtype) == (step, dtype)]
        if rows:
            title = f"{_STEPS[step]}, {_DTYPES[dtype]}"
            made.append(_grid(title, rows, "ms", lambda row: row.ms))
            if any(row.memory_gib for row in rows):
                made.append(_grid(f"{title}: memory", rows, "GiB", lambda row: row.memory_gib))
    return made


def title_of(run: str, variant: str) -> str:
    """Return the title of a column or a bar: `patch + compile`."""
    return _RUNS[run].format(VARIANTS[variant].label if variant in VARIANTS else variant)


def _grid(title: str, rows: Sequence[Row], unit: str, figure: Callable[[Row], float | None]) -> Grid:
    shown = {(row.run, row.variant) for row in rows if not row.status.startswith(NOTHING)}
    columns = [(run, variant) for run in _RUNS for variant in VARIANTS if (run, variant) in shown]
    by_place = {(row.model, row.run, row.variant): row for row in rows}
    lines = [
        (model, *(_cell(by_place.get((model, *column)), figure) for column in columns))
        for model in dict.fromkeys(row.model for row in rows)
    ]
    if unit == "ms" and len(lines) > 1:
        lines.append((_MEAN, *(_mean_speed(rows, *column) for column in columns)))
    return Grid(title, (unit, *(title_of(*column) for column in columns)), lines)


def _mean_speed(rows: Sequence[Row], run: str, variant: str) -> str:
    """Return the geometric mean, over the models that both have, of torch's time over a variant's in a run."""
    of_torch, own = (
        {row.model: row.ms for row in rows if (row.run, row.variant) == (run, name) and row.ms is not None}
        for name in (TORCH, variant)
    )
    speeds = [of_torch[model] / ms for model, ms in own.items() if model in of_torch]
    return f"{geometric_mean(speeds):.3f}" if speeds else "–"


def _cell(row: Row | None, figure: Callable[[Row], float | None]) -> str:
    if row is None or row.status.startswith(NOTHING):
        return "–"
    if not row.ok:
        return row.status.partition(":")[0]
    value = figure(row)
    return "–" if value is None else f"{value:.2f}"

"""The goals, as data, and whether results reach them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import geometric_mean
from typing import Any

from tabulate import tabulate

from .results import CEILING, PROJECT, Results, Row
from .suites import batch_invariant, batch_invariant_many, groupnorm
from .suites.sweep import MOST_SOME

_TORCH_COMPILE = ("compile", "max-autotune")
_ANY = 1 << 62
# The most rows that a table's tile for few rows serves.
_MOST_FEW = 256


@dataclass(frozen=True)
class Rule:
    """A goal for some cells of a suite.

    Attributes:
        title: what it is about.
        suite: whose cells.
        cells: a shell pattern of cell ids.
        group: a shell pattern of groups.
        least_n: the shortest row that it is about.
        most_n: the longest.
        copy: the least ratio to the throughput of a copy of x, or None.
        peer: the least ratio of the best peer's time to this project's, or None.
        peers: which peers count; none named means all. The project is one only where it is named.
        against: the cell whose peers count; empty means the same one.
        instead: what of a cell's id is to be replaced to name the cell whose peers count, and by what.
        share: of the cells, how many have to reach it.
        least_m: the fewest rows that it is about.
        most_m: the most.
        mean_peer: the least geometric mean, over its cells, of the best peer's time over this project's, or None.
        least_cells: how many cells have to be measured before it can be reached.
        provider: whose rows are held to it.
    """

    title: str
    suite: str
    cells: str = "*"
    group: str = "*"
    least_n: int = 1
    most_n: int = _ANY
    copy: float | None = None
    peer: float | None = None
    peers: tuple[str, ...] = ()
    against: str = ""
    instead: tuple[str, str] = ("", "")
    share: float = 1.0
    least_m: int = 1
    most_m: int = _ANY
    mean_peer: float | None = None
    least_cells: int = 1
    provider: str = PROJECT

    def covers(self, row: Row) -> bool:
        """Return True if the goal covers a row's cell."""
        named = fnmatch(row.cell, self.cells) and fnmatch(row.group, self.group)
        return named and self.least_m <= row.m <= self.most_m and self.least_n <= row.n <= self.most_n

    def other_cell(self, row: Row) -> str:
        """Return the cell whose peers a row is compared with."""
        old, new = self.instead
        return self.against or (row.cell.replace(old, new) if old else row.cell)


def _layer_forward(title: str, least_n: int, most_n: int, copy: float) -> Rule:
    return Rule(f"forward LN, {title}", "forward", "*/ln_bf16/*", "256 MiB", least_n, most_n, copy, 1.0)


def _layer_backward(title: str, least_n: int, most_n: int, copy: float, peer: float) -> Rule:
    return Rule(f"backward LN, {title}", "backward", "*/ln_bf16/*", "256 MiB", least_n, most_n, copy, peer)


# No more than 5 % slower than another cell of this project's.
_OURS: dict[str, Any] = {"peer": 1 / 1.05, "peers": (PROJECT,)}


def _beside_rows(title: str, kind: str) -> Rule:
    return Rule(title, "quantised-decode", f"*_{kind}/*", instead=(f"_{kind}/", "_row/"), **_OURS)


def _together(title: str, way: str, most: float) -> Rule:
    return Rule(title, "latents", "*_together/*", instead=("_together", f"_{way}"), **{**_OURS, "peer": 1 / most})


# No more than 3 % slower, and in every cell: the cells that cost are few.
_INVARIANT: dict[str, Any] = {
    "suite": batch_invariant_many.SUITE.name,
    "least_m": _MOST_FEW + 1,
    "provider": batch_invariant.PROVIDER,
    "peer": 1 / 1.03,
    "peers": (PROJECT,),
}
_RMS = ("forward", "*/rms_bf16/*", "256 MiB", 768, 131072)
# Goals of the sweep: 95 % of fewer cells leave out less than two. Every task but backward is forward.
_SWEPT: dict[str, Any] = {"suite": "sweep", "least_cells": 40}
_MANY: dict[str, Any] = _SWEPT | {"least_m": MOST_SOME + 1}
_SOME: dict[str, Any] = _SWEPT | {"most_m": MOST_SOME}
_FORWARD, _BACKWARD = "[!b]*", "backward/*"
_ADDED = ("quantised", "add_quantised/*")
_PLAIN_CALL = "forward/ln_bf16/16x4096"

# The work that surrounds a plain norm.
_FAMILY = (
    Rule("dropout, add and LN, the add alone", "dropout", "drop_add/ln_*", instead=("drop_add/", "add/"), **_OURS),
    Rule("modulated", "modulated", "modulated/*", copy=0.90),
    Rule("modulated, backward", "modulated", "modulated_backward/*", copy=0.80),
    Rule("gated, 262144×128", "gated", "gated/*/262144x128", copy=0.90),
    Rule("gated, 262144×128, backward", "gated", "gated_backward/*/262144x128", copy=0.90),
    *(
        Rule(f"GroupNorm, {group}", "groupnorm", group=group, copy=0.80, peer=1.0)
        for group in dict.fromkeys(cell.group for cell in groupnorm.SUITE.cells)
    ),
    Rule("fp8 in, bf16 out", "fp8-inputs", copy=0.90),
    Rule("two norms around an add, M from 4096", "renormed", "renormed/*", least_m=4096, copy=0.92, peer=1.3),
    Rule("two norms around an add, backward, M from 4096", "renormed", "renormed_b*", least_m=4096, copy=0.85),
    Rule("norms over channels", "channels", "channels/*", copy=0.85, peer=1.0),
    Rule("norms of q and k with RoPE", "rotary", peer=1.0),
    Rule("norms of q and k with RoPE, decode", "rotary-decode", peer=1.0),
    _together("both latents of MLA, the first alone", "alone", 1.1),
    _together("both latents of MLA, a call each", "apart", 1.0),
)

RULES = (
    _layer_forward("N 768…16384", 768, 16384, 0.94),
    _layer_forward("N = 32768", 32768, 32768, 0.90),
    _layer_forward("N = 65536", 65536, 65536, 0.85),
    _layer_forward("N from 131072", 131072, _ANY, 0.80),
    Rule("forward RMS, N 768…131072, QuACK in every cell", *_RMS, copy=0.95, peer=0.98, peers=("quack",)),
    Rule("forward RMS, N 768…131072, best peer in most", *_RMS, peer=1.0, share=0.5),
    Rule("odd rows 1000, 4099, 5137", "forward", group="odd rows", copy=0.90, peer=2.0),
    Rule("fp32 2048×8192", "forward", group="fp32", copy=0.93, peer=1.5, peers=("eager",)),
    Rule(
        "fused add + quant, torch.compile",
        "quant",
        "*_bf16_*",
        "add + quant",
        copy=0.90,
        peer=1.4,
        peers=_TORCH_COMPILE,
    ),
    _layer_backward("N 2048…8192", 2048, 8192, 0.85, 1.05),
    _layer_backward("N = 1024", 1024, 1024, 0.70, 1.0),
    Rule("backward, N from 12288", "backward", "*_bf16/*", "256 MiB", 12288, copy=0.85, peer=1.0),
    Rule("backward at M = 4096", "backward", group="M = 4096", peer=1.0),
    Rule("decode, CUDA graph", "decode", peer=1 / 1.02),
    Rule("quantised in groups, added, M from 4096", *_ADDED, "groups*", least_m=4096, copy=0.90, peer=1.0),
    Rule("quantised in groups, added, M = 1024", *_ADDED, "groups*", most_m=1024, peer=1.0),
    Rule("quantised in groups, added, M 16…256", "quantised-decode", "add_quantised/*", "groups*", peer=1.0),
    Rule("quantised, two outputs, M from 4096", "quantised", "*", "two outputs", least_m=4096, copy=0.95, peer=1.0),
    _beside_rows("quantised in groups, M 16…256, a scale a row", "g128"),
    _beside_rows("quantised in groups, column-major, M 16…256, a scale a row", "g128_column"),
    Rule("RMS of heads in a packed qkv", "heads", "*/rms_bf16_h*", copy=0.90, peer=1.0),
    Rule("sweep forward, many rows, copy", cells=_FORWARD, copy=0.92, share=0.95, **_MANY),
    Rule("sweep forward, many rows, best peer", cells=_FORWARD, peer=1.0, share=0.95, **_MANY),
    Rule("sweep forward, many rows, best peer in every cell", cells=_FORWARD, peer=0.95, **_MANY),
    Rule("sweep forward, some rows, best peer", cells=_FORWARD, peer=1.0, share=0.95, **_SOME),
    Rule("sweep backward, some rows, best peer", cells=_BACKWARD, peer=1.0, share=0.95, **_SOME),
    Rule("sweep backward, many rows, copy", cells=_BACKWARD, copy=0.85, share=0.95, **_MANY),
    Rule("sweep backward, many rows, best peer in the mean", cells=_BACKWARD, mean_peer=1.2, **_MANY),
    *(
        Rule(f"{group}, M > {_MOST_FEW}, the default", group=group, least_cells=count, **_INVARIANT)
        for group, count in Counter(
            cell.group for cell in batch_invariant_many.SUITE.cells if cell.m > _MOST_FEW
        ).items()
    ),
    Rule("host, plain call, torch", "host", _PLAIN_CALL, peer=1.0, peers=("eager",)),
    Rule(
        "host, add + quant, torch's plain", "host", "add_quant/ln*", peer=1 / 1.1, peers=("eager",), against=_PLAIN_CALL
    ),
    Rule("host, with grad, torch", "host", "grad_forward/ln*", peer=1 / 1.2, peers=("eager",)),
    Rule("host, module under no_grad, torch", "host", "module/ln*", peer=1 / 0.95, peers=("eager",)),
    Rule("host, forward and backward, torch", "host", "grad_both/ln*", peer=1.0, peers=("eager",)),
    *_FAMILY,
)


@dataclass(frozen=True)
class Finding:
    """How one cell stands against a goal.

    Attributes:
        row: the row of the rule's provider, timed or failed.
        to_copy: its ratio to the copy; None where one of the two is missing.
        to_peer: the best peer's time over its own; None where no peer was measured, infinite where all of them fail.
        best_peer: which one that is.
        met: whether the goal is reached.
    """

    row: Row
    to_copy: float | None
    to_peer: float | None
    best_peer: str
    met: bool


@dataclass(frozen=True)
class Checked:
    """A goal with what was found in each of its cells."""

    rule: Rule
    findings: tuple[Finding, ...]

    @property
    def met(self) -> bool:
        """Return True if enough cells are measured, enough of them reach the goal, and their mean reaches it."""
        reached = sum(finding.met for finding in self.findings)
        return (
            len(self.findings) >= max(1, self.rule.least_cells)
            and reached >= self.rule.share * len(self.findings)
            and _at_least(self.mean_to_peer, self.rule.mean_peer)
        )

    @property
    def mean_to_peer(self) -> float | None:
        """The geometric mean over cells where a peer was timed; None where none was."""
        return mean_of(finding.to_peer for finding in self.findings)

    @property
    def outcome(self) -> str:
        """Say in a word if the goal is reached."""
        if not self.findings:
            return "not measured"
        if len(self.findings) < self.rule.least_cells:
            return f"fewer than {self.rule.least_cells} cells measured"
        return "reached" if self.met else "short"


def mean_of(ratios: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the known and finite ratios; None if there are none."""
    known = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    return geometric_mean(known) if known else None


def check(rule: Rule, results: Results | None) -> Checked:
    """Hold a suite's results against a goal."""
    return Checked(rule, tuple(_findings(rule, results)) if results is not None else ())


def _findings(rule: Rule, results: Results) -> Iterator[Finding]:
    for row in results.rows.values():
        if row.provider == rule.provider and rule.covers(row):
            to_copy = results.ratio_to_copy(row)
            to_peer, best_peer = _best_peer(rule, results, row)
            met = row.ok and _at_least(to_copy, rule.copy) and _at_least(to_peer, rule.peer)
            # A mean of what some cells lack says nothing.
            met = met and (rule.mean_peer is None or to_peer is not None)
            yield Finding(row, to_copy, to_peer, best_peer, met)


def _best_peer(rule: Rule, results: Results, row: Row) -> tuple[float | None, str]:
    peers = [
        peer
        for name, peer in results.of(rule.other_cell(row)).items()
        if (name in rule.peers if rule.peers else name not in (rule.provider, PROJECT, CEILING))
    ]
    timed = [peer for peer in peers if peer.ok]
    if not peers or not row.ok:
        return None, ""
    if not timed:
        return math.inf, "all of them fail"
    best = min(timed, key=lambda peer: peer.us)
    return best.us / row.us, best.provider


def _at_least(ratio: float | None, least: float | None) -> bool:
    return least is None or (ratio is not None and ratio >= least)


def describe(checked: list[Checked], *, every: bool) -> str:
    """Return a table of the goals, and a table of the cells that fall short, or of every cell."""
    goals = [
        (
            one.rule.title,
            f"{sum(finding.met for finding in one.findings)} of {len(one.findings)}",
            _least([finding.to_copy for finding in one.findings], one.rule.copy),
            _to_peer(one),
            one.outcome,
        )
        for one in checked
    ]
    cells = [
        (
            one.rule.title,
            finding.row.cell,
            f"{finding.row.gb_per_s:.0f}" if finding.row.ok else finding.row.status,
            f"{finding.row.us:.2f}",
            _against(finding.to_copy, one.rule.copy),
            f"{_against(finding.to_peer, one.rule.peer)} {finding.best_peer}".strip(),
            "" if finding.met else "short",
        )
        for one in checked
        for finding in one.findings
        if every or not finding.met
    ]
    text = tabulate(goals, ("goal", "cells", "least to copy", "least to best peer", ""), disable_numparse=True)
    if not cells:
        return text
    heads = ("goal", "cell", "GB/s", "µs", "to copy", "to best peer", "")
    return f"{text}\n\n{tabulate(cells, heads, disable_numparse=True)}"


def _to_peer(one: Checked) -> str:
    least = _least([finding.to_peer for finding in one.findings], one.rule.peer)
    return least if one.rule.mean_peer is None else f"{_against(one.mean_to_peer, one.rule.mean_peer)} in the mean"


def _least(ratios: list[float | None], goal: float | None) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return _against(min(known, default=None), goal)


def _against(ratio: float | None, goal: float | None) -> str:
    if goal is None:
        return "–"
    return f"{'none' if ratio is None else f'{ratio:.3f}'} (≥ {goal:.3g})"

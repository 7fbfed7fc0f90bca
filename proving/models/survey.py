"""Making norms of foreign classes, and asking `patch` what it does with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

import normforge
from normforge.patching.huggingface import CastOrder
from normforge.patching.probing import formula_of

from ..evidence import Table, markdown

# A norm by its name, and not a layer that has one.
NORM = re.compile(r"(RMSNorm|LayerNorm)(Gated|1P|2d)?$")
_N = 64

_FORMULAS = {
    CastOrder.TO_INPUT_BEFORE_WEIGHT: "`weight * cast(h)`, cast to x's dtype",
    CastOrder.TO_WEIGHT_BEFORE_WEIGHT: "`weight * cast(h)`, cast to the weight's dtype",
    CastOrder.AFTER_WEIGHT: "`cast(weight * h)`",
    CastOrder.AFTER_OFFSET_WEIGHT: "`cast((1 + weight) * h)`",
}


_COLUMNS = ("class", "outcome", "formula or reason")
_TAKEN, _SKIPPED, _NOT_TRIED = "taken", "skipped", "not tried"


def survey(classes: Iterable[type[torch.nn.Module]], header: Mapping[str, str]) -> Table:
    """Patch a norm of each class, and return the full table: a row per class, by outcome and by formula or reason."""
    found = [(cls.__name__, *_outcome(cls)) for cls in classes]
    order = [_TAKEN, _SKIPPED, _NOT_TRIED]
    found.sort(key=lambda row: (order.index(row[1]), row[2], row[0].lower()))
    return Table(header, _COLUMNS, [dict(zip(_COLUMNS, row, strict=True)) for row in found])


def _outcome(cls: type[torch.nn.Module]) -> tuple[str, str]:
    """Return what `patch` does with a norm of a class, and the norm's formula or the reason why not."""
    norm = _made(cls)
    if norm is None:
        return _NOT_TRIED, ""
    formula = _formula(norm)
    done = normforge.patch(norm)
    if done.swapped:
        return _TAKEN, formula or ("a module around torch's own" if done.swapped[0].path else "torch's own")
    # The class's name is the one thing in a reason that is not common to many.
    reasons = [skipped.reason.replace(f"{cls.__name__} is", "it is") for skipped in done.skipped]
    return _SKIPPED, reasons[0] if reasons else "patch does not see it"


def _made(cls: type[torch.nn.Module]) -> torch.nn.Module | None:
    for size in (_N, (_N,)):
        try:
            return cls(size)
        except Exception:  # Anything may come out of a constructor.
            continue
    return None


def _formula(norm: torch.nn.Module) -> str | None:
    try:
        return _FORMULAS[formula_of(norm).order]
    except Exception:  # Not one of the three.
        return None


def summary(table: Table) -> str:
    """Return the section of the page: how many classes are taken, and how many have a formula or a reason in common."""
    counts = Counter((row["outcome"], row["formula or reason"]) for row in table.rows)
    outcomes = Counter(row["outcome"] for row in table.rows)
    tried = outcomes[_TAKEN] + outcomes[_SKIPPED]
    examples = {
        key: row["class"] for row in reversed(table.rows) if (key := (row["outcome"], row["formula or reason"]))
    }
    lines = [
        (outcome, why, count, examples[outcome, why])
        for (outcome, why), count in sorted(counts.items(), key=lambda each: (-outcomes[each[0][0]], -each[1]))
        if outcome != _NOT_TRIED
    ]
    parts = [
        table.where,
        f"**{outcomes[_TAKEN]} of {tried} classes are taken.** {outcomes[_NOT_TRIED]} more need more than a size to be "
        "made, and were not tried.",
        markdown(("outcome", "formula or reason", "classes", "such as"), lines),
    ]
    return "\n\n".join(parts)

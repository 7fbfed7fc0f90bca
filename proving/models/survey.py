"""Making norms of foreign classes, and asking `patch` what it does with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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


@dataclass
class Survey:
    """The findings, with classes grouped by what they have in common.

    Attributes:
        taken: by formula.
        skipped: by reason.
        not_made: those whose constructor takes more than a size.
    """

    taken: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    not_made: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """How many norms there were to patch."""
        return sum(map(len, (*self.taken.values(), *self.skipped.values())))


def survey(classes: Iterable[type[torch.nn.Module]]) -> Survey:
    """Patch a norm of each class."""
    found = Survey()
    for cls in classes:
        norm = _made(cls)
        if norm is None:
            found.not_made.append(cls.__name__)
            continue
        formula = _formula(norm)
        done = normforge.patch(norm)
        swapped, skipped = done.swapped, done.skipped
        if swapped:
            what = formula or ("a module around torch's own" if swapped[0].path else "torch's own")
            found.taken.setdefault(what, []).append(cls.__name__)
        else:
            # The class's name is the one thing in a reason that is not common to many.
            reason = skipped[0].reason.replace(f"{cls.__name__} is", "it is") if skipped else "patch does not see it"
            found.skipped.setdefault(reason, []).append(cls.__name__)
    return found


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


_COLUMNS = ("class", "outcome", "formula or reason")
_TAKEN, _SKIPPED, _NOT_TRIED = "taken", "skipped", "not tried"


def table(found: Survey, header: Mapping[str, str]) -> Table:
    """Return the full table, a row per class."""
    groups = [(_TAKEN, found.taken), (_SKIPPED, found.skipped), (_NOT_TRIED, {"": found.not_made})]
    rows = [
        dict(zip(_COLUMNS, (name, outcome, why), strict=True))
        for outcome, by_reason in groups
        for why, names in by_reason.items()
        for name in sorted(names, key=str.lower)
    ]
    return Table(header, _COLUMNS, rows)


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

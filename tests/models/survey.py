"""Making norms of foreign classes, and asking `patch` what it does with them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

import normforge
from normforge.patching.huggingface import CastOrder
from normforge.patching.probing import formula_of

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
    """What was found, classes by what they have in common.

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
        except Exception:  # Anything may come out of somebody's constructor.
            continue
    return None


def _formula(norm: torch.nn.Module) -> str | None:
    try:
        return _FORMULAS[formula_of(norm).order]
    except Exception:  # Not one of the three.
        return None


def markdown(found: Survey, header: Mapping[str, str], command: str) -> str:
    """The page."""
    taken = sum(map(len, found.taken.values()))
    parts = [
        "# Hugging Face",
        "Read this to look up whether `patch` takes a norm of Hugging Face's transformers. Each class whose name ends\n"
        "in RMSNorm or LayerNorm was made with a size of 64 and patched, on a CPU; no model was run. Written by",
        f"    {command}",
        "Run with " + ", ".join(f"{name} {value}" for name, value in header.items()) + ".",
        f"**{taken} of {found.tried} classes are taken.** {len(found.not_made)} more need more than a size to be "
        "made, and were not tried.",
        "## Taken",
        *_listed(found.taken),
        "## Skipped",
        *_listed(found.skipped),
        "## Not tried",
        _names(found.not_made),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _listed(groups: Mapping[str, list[str]]) -> list[str]:
    largest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [f"**{what}**: {len(names)}\n\n{_names(names)}" for what, names in largest_first]


def _names(names: list[str]) -> str:
    return textwrap.fill(", ".join(sorted(set(names), key=str.lower)), 120, break_on_hyphens=False)

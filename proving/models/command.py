"""The command: python -m proving models. Make norms of a library's classes, and ask `patch` what it does with them."""

from __future__ import annotations

import inspect
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

import normforge
from benchmarks.environment import revision_of
from normforge.patching.calling import CallingNorm
from normforge.patching.huggingface import CastOrder
from normforge.patching.probing import formula_of

from ..evidence import ROOT, Table, conclude, grouped, markdown, parser_of


class Library(NamedTuple):
    """A library whose norms are tried.

    Attributes:
        files: the files that define models and their layers, by a pattern.
        norm: matches the name of a norm, and not of a layer that has one.
        page: the name of its page in docs/reference/, and of its table.
    """

    files: str
    norm: re.Pattern[str]
    page: str


LIBRARIES = {
    "transformers": Library("models/*/modeling_*.py", re.compile(r"(RMSNorm|LayerNorm)(Gated|1P|2d)?$"), "huggingface"),
    "diffusers": Library(
        "**/*.py",
        re.compile(r"^(?!.*(Ada|Modulated|Conditional)).*(RMS_?|Layer|Group|Lp|Pixel)[Nn]orm(3D)?$"),
        "diffusers",
    ),
    "timm": Library("**/*.py", re.compile(r"^(Rms|Layer|Group|Simple)Norm(Exp)?1?(Act)?(2d)?(Fp32|NoBias)*$"), "timm"),
}
_N = 64

_FORMULAS = {
    CastOrder.TO_INPUT_BEFORE_WEIGHT: "`weight * cast(h)`, cast to x's dtype",
    CastOrder.TO_WEIGHT_BEFORE_WEIGHT: "`weight * cast(h)`, cast to the weight's dtype",
    CastOrder.AFTER_WEIGHT: "`cast(weight * h)`",
    CastOrder.AFTER_OFFSET_WEIGHT: "`cast((1 + weight) * h)`",
    CastOrder.CENTRED: "`cast(weight * h)` of rows less their mean",
}

_COLUMNS = ("class", "outcome", "formula or reason")
_TAKEN, _SKIPPED, _NOT_TRIED = "taken", "skipped", "not tried"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every class of a library, and print the summary."""
    parser = parser_of("models", "Which norm classes of a library, which has to be installed, patch takes.")
    parser.add_argument("library", nargs="?", choices=LIBRARIES, default="transformers", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        package: Any = import_module(options.library)
    except ModuleNotFoundError as error:
        parser.error(f"{error}; pip install {options.library}")
    header = {
        options.library: package.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "revision": options.revision or revision_of(ROOT),
    }
    library = LIBRARIES[options.library]
    found = survey(_classes(Path(package.__path__[0]), library), header)
    conclude(options, library.page, found, summary, page=Path(f"docs/reference/{library.page}.md"))
    return 0


def _classes(package: Path, library: Library) -> Iterator[type[torch.nn.Module]]:
    for path in sorted(package.glob(library.files)):
        named = re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE)
        if not any(map(library.norm.search, named)):
            continue
        name = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        for cls in vars(import_module(name)).values():
            is_own = inspect.isclass(cls) and issubclass(cls, torch.nn.Module) and cls.__module__ == name
            if is_own and library.norm.search(cls.__name__):
                yield cls


def survey(classes: Iterable[type[torch.nn.Module]], header: Mapping[str, str]) -> Table:
    """Patch a norm of each class, and return the full table: a row per class, by outcome and by formula or reason."""
    found = [(cls.__name__, *_outcome(cls)) for cls in classes]
    order = [_TAKEN, _SKIPPED, _NOT_TRIED]
    found.sort(key=lambda row: (order.index(row[1]), row[2], row[0].lower()))
    return Table.of(header, _COLUMNS, found)


def _outcome(cls: type[torch.nn.Module]) -> tuple[str, str]:
    """Return what `patch` does with a norm of a class, and the norm's formula or the reason why not."""
    norm = _made(cls)
    if norm is None:
        return _NOT_TRIED, ""
    formula = _formula(norm)
    done = normforge.patch(norm)
    if done.swapped:
        if isinstance(norm, CallingNorm):
            formula = "its own forward, which calls torch's function"
        return _TAKEN, formula or ("a module around torch's own" if done.swapped[0].path else "torch's own")
    # The class's name is the one thing in a reason that is not common to many.
    reasons = [skipped.reason.replace(f"{cls.__name__} is", "it is") for skipped in done.skipped]
    return _SKIPPED, reasons[0] if reasons else "patch does not see it"


def _made(cls: type[torch.nn.Module]) -> torch.nn.Module | None:
    # Norms of groups take the length of a group too.
    for sizes in ((_N,), ((_N,),), (_N, _N)):
        try:
            return cls(*sizes)
        except Exception:  # Anything may come out of a constructor.
            continue
    return None


def _formula(norm: torch.nn.Module) -> str | None:
    try:
        formula = formula_of(norm)
        gated = (
            f", {'x' if formula.gates_first else 'it'} times {formula.activation}(gate)" if formula.activation else ""
        )
        return _FORMULAS[formula.order] + gated
    except Exception:  # Not one of the three.
        return None


def summary(table: Table) -> str:
    """Return the section of the page: how many classes are taken, and how many have a formula or a reason in common."""
    outcomes = Counter(row["outcome"] for row in table.rows)
    tried = outcomes[_TAKEN] + outcomes[_SKIPPED]
    groups = grouped(table.rows, itemgetter("outcome", "formula or reason"))
    lines = [
        (outcome, why, len(rows), rows[0]["class"])
        for (outcome, why), rows in sorted(groups.items(), key=lambda each: (-outcomes[each[0][0]], -len(each[1])))
        if outcome != _NOT_TRIED
    ]
    parts = [
        table.where,
        f"**{outcomes[_TAKEN]} of {tried} classes are taken.** {outcomes[_NOT_TRIED]} more need more than a size to be "
        "made, and were not tried.",
        markdown(("outcome", "formula or reason", "classes", "such as"), lines),
    ]
    return "\n\n".join(parts)

"""The cases of `suites.yaml`, the few that the interpreter has time for, and cases by the kernels that they share."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from operator import attrgetter
from typing import Any

from normforge.codegen.values import Norm

from ..evidence import grouped
from .case import WORDS, Case
from .draw import TABLE

_DTYPES = {word: dtype for dtype, word in WORDS.items()}

SUITES: Mapping[str, list[dict[str, Any]]] = TABLE["suites"]


@cache
def cases() -> tuple[Case, ...]:
    """Every case, suite by suite."""
    found = (_case(suite, fields) for suite, entries in SUITES.items() for each in entries for fields in _fields(each))
    # RMSNorm with a bias and without one is one case.
    return tuple(dict.fromkeys(found))


def _fields(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each combination of an entry's lists, references replaced by values."""
    for values in product(*(value if isinstance(value, list) else [value] for value in entry.values())):
        fields: dict[str, Any] = {}
        for name, value in zip(entry, values, strict=True):
            for field, each in value.items() if isinstance(value, dict) else [(name, value)]:
                named = isinstance(each, str)
                fields[field] = fields.get(each, _DTYPES.get(each, each)) if named else each
        yield fields


def _case(suite: str, fields: dict[str, Any]) -> Case:
    m, n, gap = fields.pop("m"), fields.pop("n"), fields.pop("gap", 0)
    norm, arriving = Norm(fields.pop("norm")), tuple(fields.pop("arriving", "").split())
    # What a call of such a kind lacks.
    unused = {
        **dict.fromkeys(("bias", "next_bias"), not norm.centres),
        "weight_offset": norm is Norm.LAYER,
        "residual": fields.get("fadd", "none") == "none",
        "smooth_scale": fields.get("fquant") != "smooth_dynamic",
    }
    fields = {name: value for name, value in fields.items() if not unused.get(name)}
    if gap:
        fields["row_stride"] = n + gap
    return Case(suite, norm, (*(m if isinstance(m, list) else [m]), n), arriving=arriving, **fields)


# The interpreter runs a program at a time: lengths that cost it a fraction of a second, and a few longer ones.
_SHORT, _LONGEST = 2100, 20000
# Elements of an interpreted case that has more than two rows, and rows of any.
_FEW_ELEMENTS, _FEW_ROWS = 256, 19


@cache
def interpreted() -> tuple[Case, ...]:
    """Return a slice for the interpreter, of a few rows each: every mode of every suite, and every length up to 20,000.

    The same cases each time, drawn so that modes that share their lists of lengths take different ones.
    """
    drawn = sorted(cases(), key=lambda case: zlib.crc32(case.id.encode()))
    kept: dict[str, Case] = {}
    modes, lengths = set[object](), set[object]()
    for longest in (_SHORT, _LONGEST):
        for case in drawn:
            length = (case.suite, case.n, bool(case.arriving))
            mode = (case.suite, case.mode, case.weight)
            wanted = mode not in modes if longest == _SHORT else length not in lengths
            if case.n <= longest and (wanted or mode not in modes):
                modes.add(mode)
                lengths.add(length)
                small = fewer_rows(case)
                kept.setdefault(small.id, small)
    return tuple(kept.values())


def fewer_rows(case: Case) -> Case:
    """Return the case with two rows, or with a few more if they are short."""
    *leading, n = case.shape
    most = min(_FEW_ROWS, max(2, _FEW_ELEMENTS // n)) if len(leading) == 1 else 2
    return replace(case, shape=(*(min(size, most) for size in leading), n))


def groups(chosen: Iterable[Case]) -> list[list[Case]]:
    """Cases that share kernels side by side, so that one process compiles them once; the longest rows first."""
    return sorted(grouped(chosen, attrgetter("kernels")).values(), key=lambda group: -group[0].n)

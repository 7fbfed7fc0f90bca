"""The cases of `suites.yaml`: the established suites' and our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

from normforge.codegen.values import Norm

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

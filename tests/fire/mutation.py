"""Nested data with something in it changed, texts that are cut about, and how many examples a test takes."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ..properties.seed import FIRE


def values(*special: Any) -> st.SearchStrategy[Any]:
    """Values of every type that a document may hold, and some that its reader may stumble over."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(special),
        st.tuples(st.integers(0, 300), st.integers(0, 300)),
        st.recursive(st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner)),
    )


@st.composite
def changed(draw: st.DrawFn, document: Any, values: st.SearchStrategy[Any]) -> Any:
    """Data of dictionaries, lists and tuples, with another value, key or length somewhere."""
    if isinstance(document, dict) and document and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(document)))
        what = draw(st.sampled_from(("value", "value", "value", "drop", "rename", "add")))
        kept = {name: value for name, value in document.items() if name != key}
        if what == "value":
            return kept | {key: draw(changed(document[key], values))}
        if what == "drop":
            return kept
        return (kept if what == "rename" else document) | {draw(st.text(max_size=5)): document[key]}
    if isinstance(document, (list, tuple)) and document and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(document) - 1))
        before, behind = list(document[:at]), list(document[at + 1 :])
        what = draw(st.sampled_from(("value", "value", "value", "drop", "twice", "swap")))
        if what == "value":
            other = [draw(changed(document[at], values))]
        else:
            other = {"drop": [], "twice": [document[at]] * 2, "swap": [*behind[:1], document[at]]}[what]
        return type(document)([*before, *other, *(behind[1:] if what == "swap" else behind)])
    return draw(values)


@st.composite
def cut(draw: st.DrawFn, text: Any, inserted: st.SearchStrategy[Any]) -> Any:
    """A text, or bytes, without a part, with a part twice, or with another in between."""
    at, to = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    to = min(to, at + 40)
    other = draw(inserted)
    return draw(
        st.sampled_from(
            (text[:at], text[:at] + text[to:], text[:to] + text[at:], text[:at] + other + text[at:], text[:0])
        )
    )


# A slice by default, of the run's seed (`tests.properties.seed`): the same each time, so that a fresh clone does not
# fail by chance. With NORMFORGE_FIRE=10 a test takes ten times as many, of a fresh seed, which the run says.
_TIMES = int(os.environ.get(FIRE) or 1)


def fire(examples: int) -> settings:
    """The settings of a test that takes so many examples by default; a decorator."""
    return settings(
        max_examples=examples * _TIMES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )

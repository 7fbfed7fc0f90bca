"""Few rows that stand for many: what any row of a space has in `strength` columns together, one of the few has.

What a space leaves out is found by looking at it, so nobody lists its rules a second time: `legal_modes` says which
modes there are, and an axis that `Mode` gains is covered without a word here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from itertools import combinations
from math import prod
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from normforge.codegen.legal import legal_modes
from normforge.codegen.model import Mode
from proving.cases import Case

from . import thorough

T = TypeVar("T")


@cache
def every_mode() -> tuple[Mode, ...]:
    """Every legal mode, listed once for all that a process covers: each time takes half a second."""
    return tuple(legal_modes())


@cache
def modes_of_one_gpu() -> tuple[Mode, ...]:
    """Every legal mode without an exchange between ranks: tests/parallel has those."""
    return tuple([mode for mode in every_mode() if not mode.reduce.exchanges])


@cache
def axes_of(mode: Mode) -> tuple[Any, ...]:
    """Return a mode as the first columns of a row: words by their names, which hash faster than enums."""
    values = (getattr(mode, field.name) for field in fields(Mode))
    return tuple(value.name if isinstance(value, Enum) else value for value in values)


def covering(space: Sequence[T], columns: Callable[[T], tuple[Any, ...]], strength: int) -> list[T]:
    """Members of a space that together have every combination of `strength` columns that any member has.

    Args:
        space: every legal member.
        columns: a member's values, hashable and as many for each; no two members have all the same.
        strength: 1 for values, 2 for pairs, 3 for triples.

    Greedy, and exact about what a member adds: of test_modes' 31,332 kernels it takes 188 for triples, in 2 seconds,
    where covertable, which is told rules and not members, takes 797 in 125.
    """
    rows = _places([columns(member) for member in space])
    sizes = rows.max(axis=0) + 1
    together = [list(chosen) for chosen in combinations(range(rows.shape[1]), strength)]
    # [combination of columns][row]: which combination of values, numbered from that of the columns' first.
    counts = [prod(sizes[chosen]) for chosen in together]
    codes = np.empty((len(together), len(space)), dtype=np.min_scalar_type(max(counts)))
    for code, chosen in zip(codes, together, strict=True):
        code[:] = np.ravel_multi_index(tuple(rows.T[chosen]), tuple(sizes[chosen]))
    starts = np.cumsum([0, *counts])
    wanted = np.ones(starts[-1], dtype=np.bool_)
    # Of each row, how many combinations nothing chosen has: the row of most is chosen next.
    lacking = np.full(len(space), len(codes), dtype=np.int32)
    taken = []
    while lacking.any():
        row = int(lacking.argmax())
        taken.append(space[row])
        values = starts[:-1] + codes[:, row]
        for code in map(codes.__getitem__, np.flatnonzero(wanted[values])):
            lacking -= code == code[row]
        wanted[values] = False
    return taken


def uncovered(
    space: Sequence[T], columns: Callable[[T], tuple[Any, ...]], chosen: Sequence[T], strength: int
) -> list[tuple[Any, ...]]:
    """Every combination of `strength` columns that a member of a space has and none of the chosen has."""

    def combinations_of(members: Sequence[T]) -> set[tuple[Any, ...]]:
        rows = [tuple(enumerate(columns(member))) for member in members]
        return {combination for row in rows for combination in combinations(row, strength)}

    return sorted(combinations_of(space) - combinations_of(chosen), key=repr)


def parametrize(
    metafunc: pytest.Metafunc,
    name: str,
    first: Callable[[], Iterable[T]],
    rest: Callable[[], Iterable[T]],
    ids: Callable[[T], str],
) -> None:
    """Give a test the first cases, and the rest as thorough ones; neither is listed for a run that does not want it."""
    runs = thorough.is_run(metafunc)
    quick = dict.fromkeys(first() if runs else ())
    more = (case for case in rest() if case not in quick) if runs and thorough.is_asked_for(metafunc.config) else ()
    cases = [pytest.param(case, id=ids(case)) for case in quick]
    cases += [pytest.param(case, id=ids(case), marks=thorough.THOROUGH) for case in more]
    # A test that has none in this run is left out by its mark: of an empty list pytest would tell that it was skipped.
    metafunc.parametrize(name, cases or [pytest.param(None, marks=thorough.THOROUGH)])


def few_first(cases: Sequence[T], columns: Callable[[T], tuple[Any, ...]], ids: Callable[[T], str]) -> list[Any]:
    """Return parameters of a test: cases that have each value of each column, and the others as thorough ones."""
    few = [ids(case) for case in covering(cases, columns, 1)]
    return thorough.first_of_each(cases, lambda case: ids(case) if ids(case) in few else None, ids)


def leave_to_thorough_runs(metafunc: pytest.Metafunc) -> None:
    """Mark the cases of a test that are not needed to have each value of each of its parameters; see also COSTLY."""
    together = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in together]
    on_a_card: dict[bool, list[Any]] = {}
    for call in metafunc._calls:
        marks = {mark.name for mark in call.marks}
        # A case that is thorough anyway stands for no other.
        if "thorough" not in marks:
            on_a_card.setdefault("gpu" in marks, []).append(call)
    for calls in on_a_card.values():
        named = groups + [[name] for name in calls[0].params if all(name not in group for group in groups)]
        varied = [column for group in named for column in _columns(calls, group) if len(set(column)) > 1]
        kept = [*range(len(calls))]
        if len(varied) > 1:
            kept = sorted(place for place, _ in covering(list(enumerate(zip(*varied, strict=True))), itemgetter(1), 1))
        if metafunc.definition.get_closest_marker("costly"):
            kept = kept[::3]
        for place in {*range(len(calls))} - {*kept}:
            calls[place].marks.append(thorough.THOROUGH.mark)


def _columns(calls: Sequence[Any], names: Sequence[str]) -> list[tuple[int, ...]]:
    """For each case of a test which values it has of parameters that are given together, counted as they appear.

    A case of `proving/cases.yaml` has a column for each axis.
    """
    given = [tuple(call.params[name] for name in names) for call in calls]
    of_table = [(case.family, dict(case.at)) for case, *_ in given if isinstance(case, Case)]
    if len(of_table) < len(given):
        # A value of a parameter is one object in all of its cases.
        return [_counted(tuple(map(id, values)) for values in given)]
    axes = dict.fromkeys(axis for _, at in of_table for axis in at)
    return [_counted((family, at.get(axis)) for family, at in of_table) for axis in axes]


def _counted(values: Iterable[Hashable]) -> tuple[int, ...]:
    places: dict[Hashable, int] = {}
    return tuple(places.setdefault(value, len(places)) for value in values)


def _places(rows: Sequence[tuple[Any, ...]]) -> npt.NDArray[np.intp]:
    """Rows as an array: each value by its place among its column's."""
    values = [{value: place for place, value in enumerate(dict.fromkeys(column))} for column in zip(*rows, strict=True)]
    return np.array([[place[value] for place, value in zip(values, row, strict=True)] for row in rows])

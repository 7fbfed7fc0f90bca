"""Which instance serves a call: the loaded table, what was generated on demand, or an error that says why none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from .. import settings
from ..call_kinds import CallKind
from ..codegen.groups import AnyMode
from ..errors import TableError
from ..locks import fork_safe
from ..settings import named
from . import invariance
from .table import Entry, Table, load_folder, table_of

_lock = fork_safe(threading.RLock())
_loaded: Table | None = None
# By mode; a mode's entries are replaced together, so that readers need no lock.
_generated: dict[str, tuple[Entry, ...]] = {}


class Observer(Protocol):
    """An observer of the instances and the kernels that calls ask for."""

    def note(self, mode: AnyMode, n: int, table: Table) -> None:
        """The instance for rows of n elements is asked for of the loaded table, and is looked for next."""

    def note_call(self, kind: CallKind) -> None:
        """The kernels of a kind of call are chosen, and are made ready next."""


_observers: tuple[Observer, ...] = ()

Plans = MutableMapping[Hashable, Any]


class _PlansByCaller(Plans):
    """Plans of two kinds, where callers differ in whether they ask for batch invariance: each sees its own."""

    def __init__(self, by_default: Plans, otherwise: Plans) -> None:
        self._by_default, self._otherwise = by_default, otherwise

    def mine(self) -> Plans:
        """Return the plans of the calling thread."""
        return self._by_default if invariance.is_on() is invariance.by_default() else self._otherwise

    def get(self, key: Hashable, default: Any = None) -> Any:
        # Hot, and without the try of the one that is inherited.
        return self.mine().get(key, default)

    def __getitem__(self, key: Hashable) -> Any:
        return self.mine()[key]

    def __setitem__(self, key: Hashable, plan: Any) -> None:
        self.mine()[key] = plan

    def __delitem__(self, key: Hashable) -> None:
        del self.mine()[key]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.mine())

    def __len__(self) -> int:
        return len(self.mine())


# What checked calls came to, by their keys: see `forward` and `backward`. Another table starts another dictionary, so
# that a call which was checked under the last one and is still on its way leaves nothing in this one. A dictionary of
# one kind's alone while all callers are alike: a call that looks it up asks nobody which kind it is of.
plans: Plans = {}
# Those of callers who ask for what holds by default, and of those who ask for the other.
_kinds: tuple[Plans, Plans] = plans, {}
_tells_apart = False

# Keys of tensors with several leading strides depend on M, and could grow in number without end.
_MOST_PLANS = 4096


def load_instances(folder: str | os.PathLike[str] | None = None) -> None:
    """Make every later call use the dispatch table of `folder` instead of the one in use.

    What was generated on demand before is forgotten: what the new table lacks is missing again.

    Args:
        folder: what `normforge generate --out` or `generate.py --out` wrote; None is the table that normforge came
            with, whatever NORMFORGE_INSTANCES says. That environment variable names such a folder for the whole
            process; a relative one is held against the folder in which normforge was imported.

    Raises:
        TableError: the folder holds no table that this version reads. The table in use stays in use.
    """
    global _loaded, _generated
    table = _own() if folder is None else load_folder(named(folder, TableError))
    with _lock:
        _loaded, _generated = table, {}
        _take(({}, {}))


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Make every call within, in whichever thread, use another table: one that is retiled, to time or test a tile."""
    global _loaded
    with _lock:
        before, kinds = loaded(), _kinds
        _loaded = table
        _take(({}, {}))
    try:
        yield
    finally:
        with _lock:
            _loaded = before
            _take(kinds)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell an observer what calls within ask for, in whichever thread: once for each plan and class of M of it."""
    global _observers
    with _lock:
        # Calls that were checked before have to ask again. In this order: who finds the new plans finds the observer.
        _observers = (*_observers, observer)
        _take(({}, {}))
    try:
        yield
    finally:
        with _lock:
            _observers = tuple(other for other in _observers if other is not observer)


def tell_callers_apart(apart: bool) -> None:
    """Have each call see plans of its own kind, from when on one may be batch invariant and another not; or not so."""
    global _tells_apart
    with _lock:
        if apart is not _tells_apart:
            _tells_apart = apart
            _take(_kinds)


def forget() -> None:
    """Have calls that were checked before ask again."""
    with _lock:
        _take(({}, {}))


def _take(kinds: tuple[Plans, Plans]) -> None:
    global plans, _kinds
    _kinds = kinds
    plans = _PlansByCaller(*kinds) if _tells_apart else kinds[0]


def remember(among: Plans, key: Hashable, plan: object) -> None:
    """Add to the `plans` that were in use when a call set out."""
    if len(among) >= _MOST_PLANS:
        among.clear()
    among[key] = plan


def instances() -> tuple[Entry, ...]:
    """Everything a call can take without generating: the loaded table, then what was generated on demand."""
    return tuple(chain(loaded(), *tuple(_generated.values())))


def loaded() -> Table:
    """The table in use; the first call reads it."""
    global _loaded
    with _lock:
        if _loaded is None:
            # A policy that is none is refused by the first call, and not by the first miss.
            settings.generates()
            folder = settings.instances()
            _loaded = _own() if folder is None else load_folder(folder)
        return _loaded


def _own() -> Table:
    return table_of("normforge.generated", "normforge's own generated/ folder")


def find(mode: AnyMode, n: int) -> Entry:
    """The instance that serves rows of n elements, generated now if need be; under batch invariance, as it does then.

    Raises:
        MissingInstanceError: the table lacks it and NORMFORGE_ON_MISS is "error".
    """
    for observer in _observers:
        observer.note(mode, n, loaded())
    entry = loaded().find(mode.name, n) or _on_miss(mode, n, generate=True)
    return entry.invariant if invariance.is_on() else entry


def tell(make: Callable[[], CallKind]) -> None:
    """Tell observers, if there are any, of which kind a call is whose kernels are chosen."""
    if _observers:
        kind = replace(make(), invariant=invariance.is_on())
        for observer in _observers:
            observer.note_call(kind)


def name_of(mode: AnyMode, n: int) -> str:
    """The name of the instance that `find` would take; nothing is generated."""
    entry = loaded().find(mode.name, n) or _on_miss(mode, n, generate=False)
    return entry.name


def _on_miss(mode: AnyMode, n: int, *, generate: bool) -> Entry:
    if not settings.generates():
        from .missing import missing_instance

        raise missing_instance(mode, n, loaded())
    made = _made(mode, n)
    if made is not None:
        return made

    from . import on_demand

    if not generate:
        return on_demand.plan(mode, n)
    with _lock:
        # Another thread may have missed the same instance and made it meanwhile.
        entry = _made(mode, n)
        if entry is None:
            entry = on_demand.generate(mode, n, loaded().where)
            _generated[entry.mode] = (*_generated.get(entry.mode, ()), entry)
        return entry


def _made(mode: AnyMode, n: int) -> Entry | None:
    return next((made for made in _generated.get(mode.name, ()) if made.serves(n)), None)

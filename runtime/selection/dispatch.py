"""The instance that serves a call: from the loaded table, generated on demand, or an error that says why none does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import settings
from ..call_kinds import CallKind
from ..codegen.groups import AnyMode
from ..codegen.instance import Bucket
from ..errors import TableError
from ..locks import fork_safe
from . import invariance
from .table import Entry, Source, Table, load_folder, table_of

_lock = fork_safe(threading.RLock())
_loaded: Table | None = None
# Replaced by each instance that is generated, so that readers need no lock.
_NOTHING = Table("the cache", ())
_generated = _NOTHING


@dataclass(frozen=True)
class Recorded:
    """The instances and the kernels that calls ask for.

    Attributes:
        instances: modes with the buckets that serve them, or would serve them if the table did not lack them.
        calls: the kinds of call whose kernels are chosen.
    """

    instances: frozenset[tuple[AnyMode, Bucket]] = frozenset()
    calls: frozenset[CallKind] = frozenset()

    def __or__(self, other: Recorded) -> Recorded:
        return Recorded(self.instances | other.instances, self.calls | other.calls)


# Told of an instance before the look-up, and of a kind of call before the kernels are made ready.
Observer = Callable[[Recorded], object]

_observers: tuple[Observer, ...] = ()

Plans = dict[Hashable, Any]

# Plans of checked calls, by their keys: see `forward` and `backward`. Another table starts another dictionary, so that
# a call that was checked under the last table and is still running leaves nothing in the new dictionary. While callers
# differ in whether they ask for batch invariance, the module has no such name, and `__getattr__` finds the plans of
# the calling thread.
plans: Plans = {}
# The plans of callers that follow the default setting, and of callers that ask for the opposite.
_kinds: tuple[Plans, Plans] = plans, {}
_tells_apart = False

if not TYPE_CHECKING:

    def __getattr__(name):
        if name == "plans":
            return _kinds[invariance.is_on() is not invariance.by_default()]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Keys of tensors with several leading strides depend on M, so that their number has no bound.
_MOST_PLANS = 4096


def load_instances(folder: str | os.PathLike[str] | None = None) -> None:
    """Make every later call use the dispatch table of `folder` instead of the table in use.

    Instances that were generated on demand are forgotten: an instance that the new table lacks is missing again.

    Args:
        folder: a folder that `normforge generate --out` or `generate.py --out` wrote. None is the table that normforge
            comes with, whatever NORMFORGE_INSTANCES says. This environment variable names a folder for the whole
            process; a relative path starts from the folder in which normforge was imported.

    Raises:
        TableError: the folder holds no table that this version reads. The table in use stays in use.
    """
    global _loaded, _generated
    table = _own() if folder is None else load_folder(settings.named(folder, TableError))
    with _lock:
        _loaded, _generated = table, _NOTHING
        _take(({}, {}))


@contextmanager
def using(table: Table) -> Iterator[None]:
    """Make every call within, in any thread, use another table, such as a retiled table to time or test a tile."""
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
    """Report to an observer what calls within ask for, in any thread: once per plan and class of M."""
    global _observers
    with _lock:
        # Calls that were checked before have to ask again. In this order, a call that finds the new plans finds the
        # observer.
        _observers = (*_observers, observer)
        _take(({}, {}))
    try:
        yield
    finally:
        with _lock:
            _observers = tuple(other for other in _observers if other is not observer)


def tell_callers_apart(apart: bool) -> None:
    """Give each kind of caller, batch invariant or not, plans of its own if `apart` is True; else share one table."""
    global _tells_apart
    with _lock:
        if apart is not _tells_apart:
            _tells_apart = apart
            _take(_kinds)


def forget() -> None:
    """Forget all plans, so that calls that were checked before ask again."""
    with _lock:
        _take(({}, {}))


def _take(kinds: tuple[Plans, Plans]) -> None:
    global plans, _kinds
    _kinds = kinds
    if not _tells_apart:
        plans = kinds[0]
    else:
        globals().pop("plans", None)


def remember(among: Plans, key: Hashable, plan: object) -> None:
    """Add a plan to the `plans` that were in use when the call began."""
    if len(among) >= _MOST_PLANS:
        among.clear()
    among[key] = plan


def instances() -> tuple[Entry, ...]:
    """Return all instances a call can take without generating: the loaded table, then those generated on demand."""
    return (*loaded(), *_generated)


def loaded() -> Table:
    """Return the table in use; the first call reads the table."""
    global _loaded
    with _lock:
        if _loaded is None:
            # The first call, rather than the first miss, raises for an invalid policy.
            settings.generates()
            folder = settings.instances()
            _loaded = _own() if folder is None else load_folder(folder)
        return _loaded


def _own() -> Table:
    return table_of("normforge.generated", "normforge's own generated/ folder")


def find(mode: AnyMode, n: int) -> Entry:
    """Return the instance that serves rows of n elements, generated now if the table lacks the instance.

    Under batch invariance, return the instance's invariant form.

    Raises:
        MissingInstanceError: the table lacks the instance and NORMFORGE_ON_MISS is "error".
    """
    if _observers:
        from .missing import bucket_of

        _report(Recorded(instances=frozenset({(mode, bucket_of(mode, n, loaded()))})))
    entry = loaded().find(mode.name, n) or _on_miss(mode, n, generate=True)
    return entry.invariant if invariance.is_on() else entry


def tell(make: Callable[[], CallKind]) -> None:
    """Report the kind of a call whose kernels are chosen to the observers, if any."""
    if _observers:
        _report(Recorded(calls=frozenset({replace(make(), invariant=invariance.is_on())})))


def _report(recorded: Recorded) -> None:
    for observer in _observers:
        observer(recorded)


def name_of(mode: AnyMode, n: int) -> str:
    """Return the name of the instance that `find` would take; nothing is generated."""
    entry = loaded().find(mode.name, n) or _on_miss(mode, n, generate=False)
    return entry.name


def several(kernels: Any) -> Source:
    """Return the kernel that calls some forward kernels, `codegen.several.Kernels`, generated on demand."""
    from . import on_demand

    return on_demand.several(kernels)


def _on_miss(mode: AnyMode, n: int, *, generate: bool) -> Entry:
    global _generated
    if not settings.generates():
        from .missing import missing_instance

        raise missing_instance(mode, n, loaded())
    from . import on_demand

    with _lock:
        entry = _generated.find(mode.name, n)
        if entry is None and not generate:
            return on_demand.plan(mode, n)
        if entry is None:
            entry = on_demand.generate(mode, n, loaded().where)
            _generated = Table(_NOTHING.where, (*_generated, entry))
        return entry

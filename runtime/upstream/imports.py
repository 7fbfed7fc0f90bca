"""Imports of modules by others: act once one has ended, and import anew in a child what a fork cut off."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Act as soon as a module is imported: now if it is already, else at the end of the import that brings it.

    Args:
        name: the module's.
        action: called without arguments, once.
    """
    # The entry of a module that may not be imported is None.
    if sys.modules.get(name) is not None:
        action()
    else:
        sys.meta_path.insert(0, _Awaiting(name, action))


class _Awaiting(MetaPathFinder):
    """A finder that finds no module itself: it has the loader of another finder call an action after the module ran."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        # The other finders are asked without this finder, which returns to its place in case the import fails.
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                self._action()

            # The loader is this spec's alone; another in its place would hide the source and resources that it knows.
            spec.loader.exec_module = run_and_act  # type: ignore[method-assign]  # of this loader alone
        return spec


def _forget_halfway() -> None:
    """Have a forked child import anew what other threads of its parent were importing.

    The child inherits the lock of a module that is half imported, and not the thread that would release the lock: an
    import of that module would wait for ever. Python has no public name for these locks; without them nothing is done.
    """
    locks = vars(sys.modules["importlib._bootstrap"]).get("_module_locks", {})
    for name in [name for name, lock in locks.items() if getattr(lock(), "owner", None)]:
        if locks.pop(name)().owner != threading.get_ident():
            sys.modules.pop(name, None)


os.register_at_fork(after_in_child=_forget_halfway)

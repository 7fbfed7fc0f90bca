"""Locks that are free in a forked child, where the threads that held them do not exist."""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

_Lock = TypeVar("_Lock")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(lock: _Lock) -> _Lock:
    """Free a lock of the module `threading` in every forked child, and return the lock.

    Without `fork_safe`, a child that is forked while another thread holds the lock waits for the lock for ever. An
    RLock that the forking thread itself holds stays held.
    """
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in _locks:
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free)

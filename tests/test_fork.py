"""A child that is forked while other threads are within normforge can call a norm, and take every lock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from normforge import locks
from normforge.codegen.lazy import cached_property
from normforge.codegen.locking import locked

from .calling import printed
from .forking import in_child
from .thorough import THOROUGH

ROOT = Path(__file__).resolve().parents[1]

# A thread makes the first call of the process, and the main thread forks in the midst of each import that this brings.
FIRST = """
import sys, threading, time, torch, normforge
from tests.forking import in_child

def call():
    normforge.group_norm(torch.ones(2, 8, 3), 2)
    return True

def midst():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(("triton", "normforge."))]
    return [module for module in modules if getattr(module.__spec__, "_initializing", False)]

first = threading.Thread(target=call)
first.start()
found = []
while first.is_alive() and len(found) < 8 and None not in found:
    if midst():
        found.append(in_child(call, 60))
    else:
        time.sleep(0.0005)
first.join()
print(set(found))
"""


@THOROUGH
def test_a_child_that_is_forked_during_a_first_call_calls_norms_too() -> None:
    assert printed(FIRST, OMP_NUM_THREADS="1").splitlines()[-1] == "{True}"


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_a_lock_is_free_in_a_child(kind: Callable[[], threading.Lock]) -> None:
    lock, holds, done = locks.fork_safe(kind()), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        assert in_child(lambda: lock.acquire(timeout=1)) is True
        assert not lock.acquire(blocking=False), "the parent's thread holds the lock as before"
    finally:
        done.set()
        thread.join()


def test_what_the_forking_thread_holds_it_holds_in_the_child() -> None:
    lock = locks.fork_safe(threading.RLock())
    with lock:

        def released() -> bool:
            lock.release()
            return True

        assert in_child(released) is True


def test_a_property_that_another_thread_computes_is_free_in_a_child() -> None:
    computes, done = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> int:
            """Docstring."""
            if threading.current_thread() is thread:
                computes.set()
                done.wait()
            return 1

    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    computes.wait()
    assert in_child(lambda: Slow().value == 1) is True
    done.set()
    thread.join()
    slow = Slow()
    assert slow.value == vars(slow)["value"] == 1
    assert Slow.value.__doc__ == "Docstring."


def has_opened(process: int, path: Path) -> bool:
    try:
        return any(link.readlink() == path for link in Path(f"/proc/{process}/fd").iterdir())
    except FileNotFoundError:
        # It closed another file meanwhile.
        return False


@THOROUGH
def test_a_file_that_was_locked_at_a_fork_is_free_when_the_parent_is_done(tmp_path: Path) -> None:
    """A child has the parent's open files, and with them a share of the parent's lock."""
    path = tmp_path / "lock"
    waits = (
        f"from normforge.codegen.locking import locked\nwith locked(__import__('pathlib').Path({str(path)!r})): pass"
    )
    with locked(path):
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        waiting = subprocess.Popen([sys.executable, "-c", waits], env=os.environ | {"PYTHONPATH": str(ROOT)})
        while not has_opened(waiting.pid, path):
            time.sleep(0.01)
    try:
        assert waiting.wait(timeout=60) == 0
    finally:
        waiting.kill()
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_every_lock_is_free_in_a_child() -> None:
    """No module makes one that `fork_safe` does not know, or a property that Python guards with one."""
    paths = [path for folder in ("runtime", "codegen", "tools") for path in (ROOT / folder).rglob("*.py")]
    # A bracket behind the name ends a type.
    unsafe = re.compile(
        r"(?<!fork_safe\()\bthreading\.R?Lock\b(?!\])|from threading import|from functools import.*cached_pr"
    )
    found = {(path.name, line) for path in paths for line in path.read_text().splitlines() if unsafe.search(line)}
    # For releases of Python where it takes no lock.
    assert found == {("lazy.py", "    from functools import cached_property as cached_property")}

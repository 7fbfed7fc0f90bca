"""Who may run at once: workers share the device, and a capture or a measurement has it alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A permit for each of several threads; a thread that runs alone holds all of them."""

    def __init__(self, threads: int) -> None:
        self._threads, self._permits, self._one = threads, threading.Semaphore(threads), threading.Lock()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Run beside others, once no thread has the gate alone."""
        # Held for a moment: a thread that waits to be alone lets no other thread in.
        with self._one:
            self._permits.acquire()
        try:
            yield
        finally:
            self._permits.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run by oneself, once all others are done; who comes later waits."""
        with self._one:
            for _ in range(self._threads):
                self._permits.acquire()
            try:
                yield
            finally:
                self._permits.release(self._threads)

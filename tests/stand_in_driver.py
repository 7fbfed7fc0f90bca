"""A GPU driver for a machine without a GPU: says that an H200 is here, and notes what is loaded and launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock


class Driver:
    """As much of a driver as Triton's compiler and its compiled kernels ask for."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.loaded: list[tuple[str, bytes, int]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448}, load_binary=self._load
        )

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *given: self.launched.append((source.name, *given))

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded.append((name, binary, shared))
        return "a module", "a function", 32, 0, 1024


@contextmanager
def driving() -> Iterator[Driver]:
    """Make Triton take the stand-in for its driver."""
    import triton
    from triton.compiler import compiler

    driver = Driver()
    compiler.max_shared_mem.cache_clear()
    try:
        # Its own way back would look for a driver that is really here.
        with mock.patch.object(triton.runtime.driver, "_active", driver):
            yield driver
    finally:
        compiler.max_shared_mem.cache_clear()

"""A session records launches in place of running them, and can drop each cache that a call may have filled."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from normforge.calls import native
from normforge.calls.native import Lookup
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch

# torch's stubs lack some of what is there.
_C: Any = torch._C

# What is kept there depends on calls. Elsewhere functions keep what the machine, its disk and torch's release are like.
_PACKAGES = ("calls", "families", "patching", "operators", "parallel", "compiled", "override", "jax")
_FORGETFUL = tuple(f"normforge.{name}." for name in _PACKAGES)
_KEPT = ("normforge.calls.native",)


@functools.lru_cache(1)
def _functions(modules_there: int) -> list[tuple[ModuleType, str, Any]]:
    """Return each function that keeps what it returned, wherever it has a name; asked once for so many modules."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("normforge.") and module]
    return [
        (module, name, value)
        for module in modules
        for name, value in list(vars(module).items())
        if isinstance(value, functools._lru_cache_wrapper)
        and value.__module__.startswith(_FORGETFUL)
        and value.__module__ not in _KEPT
    ]


@contextmanager
def forgotten() -> Iterator[None]:
    """Have calls within find no cache filled, as in a new process; afterwards all caches are as they were."""
    plans = dispatch._kinds
    functions = _functions(len(sys.modules))
    fresh = {id(old): functools.lru_cache(old.cache_parameters()["maxsize"])(old.__wrapped__) for *_, old in functions}
    dispatch._take(({}, {}))
    for module, name, old in functions:
        setattr(module, name, fresh[id(old)])
    try:
        yield
    finally:
        dispatch._take(plans)
        for module, name, old in functions:
            setattr(module, name, old)


class Session:
    """Launches in the order in which they came, and how often a kernel was chosen.

    Attributes:
        launches: the compilation, the grid and the values of each launch.
        finds: how many kernels were looked for in the table.
        roles: names of tensors by their addresses.
        alone: what calls come to in a new process, by their names and properties.
        by_address: whether launches take addresses, as on a GPU, and calls are found in C, where that can be had.
    """

    def __init__(self, *, by_address: bool) -> None:
        self.by_address = by_address
        self.launches: list[tuple[Any, ...]] = []
        self.finds = 0
        self.roles: dict[int, str] = {}
        self.alone: dict[tuple[str, str], Any] = {}

    def name(self, role: str, tensor: Any) -> None:
        """Have launches call a tensor by its role, the first one that its memory has."""
        if isinstance(tensor, torch.Tensor):
            try:
                if tensor.numel() and not _C._is_cow_tensor(tensor):
                    self.roles.setdefault(tensor.data_ptr(), f"{role}{' negated' * tensor.is_neg()}")
            except RuntimeError:
                # torch has no address for a tensor without memory, such as a fake one.
                return

    def start(self) -> None:
        """Forget what was recorded."""
        self.launches, self.finds, self.roles = [], 0, {}

    def _record(self, launcher: Launcher, grid: Any, values: tuple[Any, ...]) -> None:
        self.launches.append((launcher.key, tuple(grid), tuple(map(self._described, values))))

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            role = self.roles.get(value.data_ptr(), "new" + " negated" * value.is_neg())
            # Kernels see no shape: a known call may bring views of one that was checked.
            return role, value.dtype, value.numel()
        if isinstance(value, int) and value > 2**32:
            return self.roles.get(value, "new")
        return repr(value)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record launches within, of calls that find nothing cached from before."""
        make, find = Launcher.__init__, dispatch.find

        def made(launcher: Launcher, *arguments: Any, **named: Any) -> None:
            make(launcher, *arguments, **named)
            if self.by_address:
                launcher.launch = functools.partial(self._record, launcher)

        def found(*arguments: Any) -> Any:
            self.finds += 1
            return find(*arguments)

        native.start()
        look_ups = native.makes(build=True) if self.by_address else Lookup
        with ExitStack() as stack:
            stack.enter_context(forgotten())
            for place, name, value in (
                (Launcher, "__init__", made),
                (Launcher, "launch_tensors", lambda *launch: self._record(*launch)),
                (dispatch, "find", found),
                (native, "calls", native.calls_among(dispatch, look_ups, native._records)),
            ):
                stack.enter_context(mock.patch.object(place, name, value))
            yield
        # Plans that launch nothing are gone with what holds them.
        gc.collect()

"""Switch the rewriting of torch.compile's graphs: for the process, and within a `with`."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from ..locks import fork_safe
from ..upstream import torch_inductor
from ..upstream.imports import when_imported

_lock = fork_safe(threading.RLock())
_enabled = False
_said = False


class compile_passes:
    """Have torch.compile join normforge's operators with what stands beside them in a graph, or not.

    A residual's addition before a norm becomes part of its kernel, whose sum replaces the addition's for all readers,
    and so does an addition to y, which is then not rounded by itself; backward the residual's gradient is added where
    dx is computed; a cast of y, and a bias on x, join as well.

    Called, it holds for the whole process from then on. In a `with` it holds until that ends. It decides about graphs
    that are compiled from then on, with the backend "inductor"; what was compiled before stays what it was. Passes
    that were set before, under `torch._inductor.config.post_grad_custom_pre_pass`, are run as well. One that is set
    afterwards, or given to torch.compile as an option, takes this one's place.

    With a release of torch whose graphs are unknown nothing is rewritten, which a warning says once.

    Args:
        enabled: whether graphs are rewritten.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._before = _enabled
        _switch(enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *details: object) -> None:
        _switch(self._before)


def is_enabled() -> bool:
    """Return True if graphs that are compiled now are rewritten, given a known release of torch."""
    return _enabled


def _switch(enabled: bool) -> None:
    global _enabled
    with _lock:
        _enabled = enabled
        # Whoever compiles nothing does not wait for Inductor's import, after which this runs again.
        if torch_inductor.is_loaded():
            there = torch_inductor.installed()
            if enabled:
                _install()
            elif _ours(there):
                torch_inductor.uninstall(there, there.before)


def _install() -> None:
    global _said
    reason = torch_inductor.reason_against()
    if reason is not None:
        if not _said:
            _said = True
            warnings.warn(
                f"normforge leaves torch.compile's graphs as they are: {reason}. Results are the same; "
                "normforge.compile_passes(False), and patch(model, compile_passes=False), switch this message off",
                stacklevel=4,
            )
        return
    from .graph_pass import FuseNeighbours

    there = torch_inductor.installed()
    if not _ours(there):
        torch_inductor.install(FuseNeighbours(there))


def _ours(custom_pass: Any) -> bool:
    # Asked by name, because importing its module imports Inductor.
    return type(custom_pass).__module__ == f"{__package__}.graph_pass"


# This module looks for passes, after all other code that may set one.
when_imported("torch._inductor.compile_fx", lambda: _switch(_enabled))

"""Two ways to make calls batch invariant: a context manager, and the switches of engines."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType

from torch.compiler import is_dynamo_compiling

from ..errors import ConflictError
from ..locks import fork_safe
from ..upstream.torch_dynamo import constant_in_traces
from . import dispatch, invariance

invariance.is_traced = is_dynamo_compiling
constant_in_traces(invariance.by_default)

_lock = fork_safe(threading.RLock())
# Of every block that some context is still within: a task that was created in a block may outlive the block.
_alive: weakref.WeakSet[invariance.Asked] = weakref.WeakSet()


class batch_invariant:
    """Have a row's results not depend on the batch that it is in, within a `with`.

    y, residual_out, y_scale, mean, rstd and dx of a row then have the same bits for every M, wherever the row stands in
    the batch and however it lies in memory, whether a call is eager, compiled or in a CUDA graph: all kernels come from
    one ladder of tiles, which does not look at M. NORMFORGE_BATCH_INVARIANT=1 does the same for a whole process.

    It holds for the thread, or the asynchronous task, that enters it, and for what copies that context within it: a
    task that is created there, or a function in `asyncio.to_thread`, stays invariant for good. The backward pass of
    what is recorded within it is invariant too, wherever it runs. What torch.compile traces while any thread is within
    it is invariant for good, and what it compiled before is compiled once more; enter it around compiled functions, not
    in them.

    Args:
        enabled: False has eager calls within depend on the batch again, where they would not.

    Raises:
        InvarianceError: from calls within, where a row's bits would depend on the batch, or a norm would be left to
            torch's own operators.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise ConflictError(f"enabled is {enabled!r}; batch_invariant takes True or False")
        self._enabled = enabled

    def __enter__(self) -> None:
        # A setting that is none is refused here, and not at some call.
        invariance.by_default()
        asked = invariance.Asked(self._enabled)
        with _lock:
            _alive.add(asked)
            _tell_apart()
        invariance.asked.set((*invariance.asked.get(), asked))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        invariance.asked.set(invariance.asked.get()[:-1])
        with _lock:
            _tell_apart()


def _tell_apart() -> None:
    """Have calls see the plans of callers like them while some context is within a block, and one table otherwise.

    Contexts that die outside of any block are noticed when a block is next entered or left. Until then calls ask what
    they are once too often, and choose the same kernels.
    """
    within = len(_alive) > 0
    invariance.anywhere = within or invariance.by_default()
    dispatch.tell_callers_apart(within)


def follow(switch: str) -> None:
    """Have all calls be batch invariant, as NORMFORGE_BATCH_INVARIANT=1 does, because a switch of an engine's is on.

    For the process and for good: kernels that calls chose before are forgotten, and what torch.compile traced before is
    traced once more. `batch_invariant(False)` still leaves it out.

    Args:
        switch: its name, for errors.
    """
    with _lock:
        if switch not in invariance.followed:
            invariance.insist(switch)
            dispatch.forget()

"""Two ways to make calls batch invariant: a context manager, and the switches of engines."""

from __future__ import annotations

import threading
import weakref

from torch.compiler import is_dynamo_compiling

from ..errors import ConflictError
from ..locks import fork_safe
from ..upstream.torch_internals import constant_in_traces
from . import dispatch, invariance

invariance.is_traced = is_dynamo_compiling
constant_in_traces(invariance.by_default)

_lock = fork_safe(threading.RLock())
# The requests of all blocks that some context is still within: a task that a block creates may outlive the block.
_alive: weakref.WeakSet[invariance.Asked] = weakref.WeakSet()


class batch_invariant:
    """A context manager within which a row's results do not depend on the row's batch.

    y, residual_out, y_scale, mean, rstd and dx of a row have the same bits for every M, at every position in the batch
    and with every memory layout. Calls may be eager, compiled or in a CUDA graph: all kernels come from one ladder of
    tiles, which does not depend on M. NORMFORGE_BATCH_INVARIANT=1 makes a whole process batch invariant.

    The block applies to the thread or the asynchronous task that enters the block, and to copies of the context: a task
    that the block creates, or a function in `asyncio.to_thread`, stays invariant for good. The backward pass of calls
    that are recorded within the block is invariant too, wherever the backward pass runs. Code that torch.compile traces
    while any thread is within a block is invariant for good, and code compiled before is compiled once more. Enter
    blocks around compiled functions, not in them.

    Args:
        enabled: False lets eager calls within depend on the batch again, where an outer setting forbids that.

    Raises:
        InvarianceError: from calls within, where a row's bits would depend on the batch, or torch's own operators would
            compute a norm.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise ConflictError(f"enabled is {enabled!r}; batch_invariant takes True or False")
        self._enabled = enabled

    def __enter__(self) -> None:
        # An invalid setting raises here rather than at a later call.
        invariance.by_default()
        asked = invariance.Asked(self._enabled)
        with _lock:
            _alive.add(asked)
            _tell_apart()
        invariance.asked.set((*invariance.asked.get(), asked))

    def __exit__(self, *_: object) -> None:
        invariance.asked.set(invariance.asked.get()[:-1])
        with _lock:
            _tell_apart()


def _tell_apart() -> None:
    """Give invariant and other callers separate plans while some context is within a block, and one table otherwise.

    Contexts that die outside of any block are noticed when a block is next entered or left. Until then calls check for
    batch invariance needlessly, and choose the same kernels.
    """
    within = len(_alive) > 0
    invariance.anywhere = within or invariance.by_default()
    dispatch.tell_callers_apart(within)


def follow(switch: str) -> None:
    """Make all calls batch invariant, as NORMFORGE_BATCH_INVARIANT=1 does, because an engine's switch is on.

    The setting applies to the process, for good. Kernels that calls chose before are forgotten, and code that
    torch.compile traced before is traced once more. `batch_invariant(False)` still turns batch invariance off.

    Args:
        switch: the switch's name, for errors.
    """
    with _lock:
        if switch not in invariance.followed:
            invariance.insist(switch)
            dispatch.forget()

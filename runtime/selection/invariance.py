"""Batch invariance: the setting under which the bits of a row depend on the row alone."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from .. import settings
from ..errors import InvarianceError


class Asked:
    """The request of one `batch_invariant` block, alive in every context that is copied within the block."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled


# The requests of the entered blocks, the last entered last; empty outside of any `batch_invariant`.
asked: ContextVar[tuple[Asked, ...]] = ContextVar("normforge_batch_invariant", default=())

# The value of NORMFORGE_BATCH_INVARIANT; None until the first question.
_process: bool | None = None

# The switches of engines that turned batch invariance on for the process.
followed: frozenset[str] = frozenset()

# True if some thread may be asking for batch invariance. TorchDynamo follows no context variable: it guards on this.
anywhere = False

# Returns True if TorchDynamo asks. `batch` sets the function, because JAX programs need no torch.
is_traced: Callable[[], bool] = bool


def is_on() -> bool:
    """Return True if a call made now is to be batch invariant; in a trace, if any thread's call is."""
    if is_traced():
        by_default()
        return anywhere
    entered = asked.get()
    return entered[-1].enabled if entered else by_default()


def refuse_torch(what: str) -> None:
    """Raise if torch's own operators would compute something in place of a kernel under batch invariance.

    Raises:
        InvarianceError: batch invariance is on.
    """
    kernels = "normforge.layer_norm's docstring says what kernels take"
    refuse_others(what, "torch's own operators", f"call it on a GPU, in 16 or 32 bits ({kernels})")


def refuse_others(what: str, whose: str, instead: str) -> None:
    """Raise if other code, which does not promise its bits, would compute something under batch invariance.

    Args:
        what: what the other code would compute.
        whose: the name of the other code.
        instead: what to do.
    """
    if is_on():
        asked = ", ".join(["NORMFORGE_BATCH_INVARIANT", *sorted(followed)])
        raise InvarianceError(
            f"{what} is to be batch invariant ({asked}, or batch_invariant), and {whose} would "
            f"compute it, whose bits may depend on the batch; {instead}, or leave it out: with batch_invariant(False)"
        )


def by_default() -> bool:
    """Return the setting outside of any block: the value of NORMFORGE_BATCH_INVARIANT at the first call.

    Raises:
        SettingError: the variable says neither 1 nor 0.
    """
    global _process, anywhere
    if _process is None:
        _process = settings.batch_invariant()
        anywhere = anywhere or _process
    return _process


def insist(switch: str) -> None:
    """Make batch invariance the process's setting for good, because an engine's switch is on."""
    global _process, anywhere, followed
    by_default()
    followed |= {switch}
    _process = anywhere = True

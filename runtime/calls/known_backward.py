"""Backward calls that are known: of any family, looked up by key and guard, and launched without being looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Protocol

import torch

from ..selection import dispatch
from ..upstream.torch_dynamo import eager_only
from .known import MISALIGNED, Key, Known

# dy, the gradient of the sum, what was normalised and the other operands that a forward pass kept, and its statistics
# in one tensor; None for what is not there.
Arrived = tuple["torch.Tensor | None", ...]
# The key that a call was looked up by, and its tensors.
Learnt = tuple[Key, Arrived]
Gradients = list["torch.Tensor | None"]


class Ready(Protocol):
    """The launches of calls whose tensors are like those of one that was checked, all but where they lie."""

    def run(self, arrived: Arrived, addresses: Sequence[int], told: Any) -> Gradients | None:
        """Launch a call and return the gradients of its operands; None if it has no rows."""


@eager_only
def gradients_known(family: str, arrived: Arrived, told: Any, due: tuple[bool, ...]) -> tuple[Key, Gradients | None]:
    """Return the gradients of a call that is like one before, and the key that it was looked up by.

    Args:
        family: the word of its family.
        arrived: its tensors.
        told: what else a backward pass has to know; it says which operands are there.
        due: which operands have a gradient that is asked for.

    Returns:
        The key, and the gradients of the operands; None where no call was like this one.
    """
    # Which other tensors are there follows from what was told.
    key = (family, "bwd", told, due, arrived[1] is None)
    kind: Known
    for kind in dispatch.plans.get(key, ()):
        if kind.fits(*kind.present(arrived)):
            addresses = addresses_of(arrived)
            aligned = not reduce(or_, addresses) & MISALIGNED
            ready: Ready | None = kind.plan if aligned else kind.plan_at(*addresses)
            return key, None if ready is None else ready.run(arrived, addresses, told)
    return key, None


def looked_up_again(
    family: str, learnt: Learnt | None, told: Any, due: Sequence[bool], *laid_out: torch.Tensor | None
) -> tuple[Learnt | None, Gradients | None]:
    """Look a call up again whose gradients had to be copied: the copies may be like the gradients of a call before.

    Args:
        family: see `gradients_known`.
        learnt: the key and tensors of the first look-up; None for a call that is to stay unknown.
        told: see `gradients_known`.
        due: see `gradients_known`.
        *laid_out: dy and the gradient of the sum as kernels can walk them.

    Returns:
        The key and tensors of the last look-up, and the gradients if the call is known.
    """
    if learnt is None or all(own is passed for own, passed in zip(laid_out, learnt[1], strict=False)):
        return learnt, None
    arrived = (*laid_out, *learnt[1][2:])
    key, known = gradients_known(family, arrived, told, tuple(due))
    return (key, arrived), known


def addresses_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Where tensors lie, 0 for those that are not there."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

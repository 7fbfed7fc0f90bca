"""Backward calls of rows in parts that are known: what a look-up launches them by, and how one is looked up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import native
from .known import Key, Tensors, addresses_of
from .launch import run_layout
from .outputs import unpacked
from .plan import Plan, Sized

# dy, the gradient of the sum, what was normalised and the other operands that a forward pass kept, and its statistics
# in one tensor; None for what is not there.
Arrived = Tensors
# The key that a call was looked up by, and its tensors.
Learnt = tuple[Key, Arrived]
Gradients = Sequence["torch.Tensor | None"]


class Ready(NamedTuple):
    """The launches of calls whose tensors are like those of one that was checked, all but where they lie.

    Attributes:
        plan: the kernels.
        inputs: picks what launches bring from what arrived, the means and rstd.
        order: picks the gradients of a call's operands from the results, behind which None stands.
        at: from the shape of what was normalised to how calls are launched; None if there are no rows.
    """

    plan: Plan
    inputs: Callable[[Any], tuple[Any, ...]]
    order: Callable[[Any], Gradients]
    at: Callable[[torch.Size], Sized | None]

    def run(self, arrived: Arrived, addresses: Sequence[int]) -> Gradients | None:
        """Launch a call and return the gradients of its operands; None if there are no rows."""
        plan, x = self.plan, arrived[2]
        assert x is not None
        sized = self.at(x.shape)
        if sized is None:
            return None
        layout, numbers, makes, _ = sized
        empty = plan.empty
        results = tuple([None if make is None else empty(*make) for make in makes])
        made: Sequence[Any] = results
        if layout.by_address:
            at = addresses[-1]
            statistics = (at, at + layout.to_rstd) if layout.to_rstd else (0, at)
            inputs, made = self.inputs((*addresses, *statistics)), addresses_of(results)
        else:
            inputs = self.inputs(with_statistics(arrived, x.numel() // plan.n))
        run_layout(plan, layout, inputs, made, numbers)
        return self.order((*results, None))


def with_statistics(arrived: Arrived, m: int) -> Tensors:
    """Return what arrived, and behind it the means of m rows, if there are any, and rstd."""
    packed = arrived[-1]
    assert packed is not None
    return *arrived, *unpacked(packed.view(-1), m)


def looked_up_again(
    family: str, learnt: Learnt | None, told: Any, due: Sequence[bool], *laid_out: torch.Tensor | None
) -> tuple[Learnt | None, Gradients | None]:
    """Look a call up again whose gradients had to be copied: the copies may be like the gradients of a call before.

    Args:
        family: the name of the look-up among `native.calls`.
        learnt: the key and tensors of the first look-up; None for a call that is to stay unknown.
        told: what else a backward pass has to know; it says which operands are there.
        due: which operands have a gradient that is asked for.
        *laid_out: dy and the gradient of the sum as kernels can walk them.

    Returns:
        The key and tensors of the last look-up, and the gradients if the call is known.
    """
    if learnt is None or all(own is passed for own, passed in zip(laid_out, learnt[1], strict=False)):
        return learnt, None
    arrived = (*laid_out, *learnt[1][2:])
    key, known = getattr(native.calls, family).known_gradients(arrived, told, tuple(due))
    return (key, arrived), known

"""The autograd.Function that records a call of any family.

A family adds a `Recording`: how to launch, and how to compute gradients. Plain norms have Functions of their own in
`families/plain.py`, because each None that is passed to a Function takes 0.1 us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad

from ..selection.batch import batch_invariant
from ..selection.invariance import is_on
from ..upstream.torch_internals import applied, applied_at_once, dispatch_modes, eager_only, has_tangent
from . import native
from .plan import PLAIN, Key, Tensors
from .traced import is_dynamo_compiling

T = TypeVar("T")

Gradients = Sequence["torch.Tensor | None"]
# dy, the gradient of the sum, what was normalised and the other operands that a forward pass kept, and its statistics
# in one tensor; None for what is not there.
Arrived = Tensors
# The key that a backward call was looked up by, and its tensors.
Learnt = tuple[Key, Arrived]
# y, the stored sum or None, the tensors to save, args for the backward pass, and whether the call is batch invariant.
Launched = tuple[torch.Tensor, "torch.Tensor | None", Sequence[Any], Any, bool]


class BackwardPass(NamedTuple):
    """The backward pass of one call.

    Attributes:
        saved: the tensors that were saved.
        args: what else it has to know.
        dy: the gradient of y, or None.
        dresidual_out: the gradient of the stored sum, or None.
        due: for each operand, whether its gradient is.
        by_formula: whether the eager formula has to compute.
        learnt: what the call becomes known by, or None.
    """

    saved: Any
    args: Any
    dy: torch.Tensor | None
    dresidual_out: torch.Tensor | None
    due: tuple[bool, ...]
    by_formula: bool = False
    learnt: Learnt | None = None


class Recording(NamedTuple):
    """How autograd records the calls of one family.

    Attributes:
        launch: from a call and its operands to outputs, and to what the backward pass needs.
        gradients: from the backward pass to a gradient per operand.
        family: the name of the look-up of backward calls among `native.calls`; "" for calls looked up elsewhere.
        sums: indices of the operands that the stored sum is made of.
    """

    launch: Callable[[Any, tuple[Any, ...]], Launched]
    gradients: Callable[[BackwardPass], Gradients]
    family: str = ""
    sums: tuple[int, ...] = ()


def gradients_of(
    recording: Recording,
    saved: Sequence[Any],
    args: Any,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: tuple[bool, ...],
) -> Gradients:
    """Return the gradient of each operand for which one is due.

    The eager formula computes them where a gradient of the gradient could be asked for, or something sees operators.
    """
    if dy is None and dresidual_out is None:
        return [None] * len(due)
    by_formula = torch.is_grad_enabled() or is_dynamo_compiling() or dispatch_modes() > 0
    learnt = None
    # A known call does not look for a tangent of forward-mode AD.
    can_be_known = recording.family and dy is not None and not by_formula and forward_ad._current_level < 0
    if can_be_known and isinstance(saved[-1], torch.Tensor):
        arrived = (dy, dresidual_out, *saved)
        key, known = getattr(native.calls, recording.family).known_gradients(arrived, args, due)
        if known is not None:
            gradients: Gradients = known
            return gradients
        learnt = key, arrived
    return recording.gradients(BackwardPass(saved, args, dy, dresidual_out, due, by_formula, learnt))


def reentering(compute: Callable[..., T]) -> Callable[..., T]:
    """Return `compute` batch invariant wherever it runs: the backward pass of such a call, or an operator's twin."""

    @eager_only
    def run(*arguments: Any, **named: Any) -> T:
        if is_on():
            return compute(*arguments, **named)
        with batch_invariant():
            return compute(*arguments, **named)

    return run


# By whether the call was batch invariant.
_GRADIENTS = {False: gradients_of, True: reentering(gradients_of)}


def records(operands: Sequence[Any]) -> bool:
    """Return True if a gradient of an operand is due, so that autograd records the call."""
    return torch.is_grad_enabled() and any(
        # A proxy of torch.fx is neither true nor false, and what is no tensor is refused later.
        getattr(operand, "requires_grad", False) is True
        for operand in operands
    )


class _Record(torch.autograd.Function):
    """y, and the stored sum where there is one."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Recording, Any], *operands: Any) -> Any:
        recording, launch = call
        y, total, saved, args, is_invariant = recording.launch(launch, operands)
        # One attribute: each that is set takes 0.1 us.
        ctx.recorded = recording, args, is_invariant
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if total is None:
            return y
        if True not in [operands[at] is not None and operands[at].requires_grad for at in recording.sums]:
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dresidual_out: torch.Tensor | None = None) -> Any:
        recording, args, is_invariant = ctx.recorded
        compute = _GRADIENTS[is_invariant]
        return None, *compute(recording, ctx.saved_tensors, args, dy, dresidual_out, ctx.needs_input_grad[1:])


record, record_at_once = applied(_Record), applied_at_once(_Record)


def arrived_in_memory(arrived: Iterable[torch.Tensor | None]) -> bool:
    """Return True if gradients are all in memory that kernels can read.

    Several at once are not, as autograd's is_grads_batched brings them, nor is a tangent of forward-mode AD.
    """
    there = [gradient for gradient in arrived if gradient is not None]
    try:
        return all(
            gradient.__class__ in PLAIN and (gradient.data_ptr() != 0 or gradient.numel() == 0) for gradient in there
        ) and not has_tangent(there)
    except RuntimeError:
        return False

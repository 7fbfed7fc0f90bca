"""The backward pass of families whose rows are in parts: by kernels, or by the family's formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..calls import row_gradients
from ..calls.outputs import unpacked_of
from ..calls.record import Gradients, Learnt
from ..calls.row_gradients import Backward, in_memory

# dy and the gradient of the sum; None for one that did not arrive.
Pair = tuple["torch.Tensor | None", "torch.Tensor | None"]


class InParts(NamedTuple):
    """The backward pass of one family.

    Attributes:
        backward: the calls of its kernels.
        saved: makes a named tuple of the tensors that the forward pass saved, what was normalised first, of the means
            and of rstd.
        serves: from that tuple to True if the parts are as kernels take them.
        formula: from that tuple, the args, dy, the gradient of the sum and which gradients are due to gradients.
    """

    backward: Backward
    saved: Callable[..., Any]
    serves: Callable[[Any], bool]
    formula: Callable[..., Gradients]

    def takes(self, kept: Any, *arrived: torch.Tensor | None) -> bool:
        """Return True if kernels can compute the gradients of a call: all tensors are in memory, and not empty."""
        return in_memory((*kept, *arrived)) and kept[0].numel() > 0 and self.serves(kept)

    def gradients(self, kept: Any, args: Any, arrived: Pair, due: Sequence[bool], learnt: Learnt | None = None) -> Any:
        """Return what the formula does, computed by kernels, where `takes` has passed the arguments."""
        return row_gradients.gradients(self.backward, kept, args, arrived, due, learnt)

    def recorded(
        self,
        saved: Sequence[Any],
        args: Any,
        dy: torch.Tensor | None,
        dresidual_out: torch.Tensor | None,
        due: tuple[bool, ...],
        by_formula: bool,
        learnt: Learnt | None,
    ) -> Gradients:
        """Return the gradients of a call that was recorded; see `Recording`."""
        *tensors, statistics = saved
        kept = self.saved(*tensors, *unpacked_of(tensors[0], statistics))
        if dy is None or by_formula or not self.takes(kept, dy, dresidual_out):
            return self.formula(kept, args, dy, dresidual_out, due)
        grads: Gradients = self.gradients(kept, args, (dy, dresidual_out), due, learnt)
        return grads

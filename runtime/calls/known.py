"""Known calls: the properties of tensors that were checked, and the plans that serve calls of such tensors.

The key of a call holds its modes, N, and which tensors are present. Under a key are the kinds of call that were checked
before, the newest first. A kind's guard compares class, device, dtype, layout, negation and requires_grad of a call's
tensors with those of the checked call. Each call is checked for whatever no guard can hold: the number of rows,
addresses, numbers, and the overlap of outputs with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch

from ..kernels.gpu import ALIGNMENT
from ..kernels.strides import row_alignment
from ..selection import dispatch
from ..upstream.dynamo_guards import Fits, contiguous_strides, guard

# An address with any of these bits is not aligned.
MISALIGNED = ALIGNMENT - 1

# The address of a tensor without memory: no tensor has this address, which is not aligned.
NOWHERE = 1

# Anything else may answer the same questions and be something else: a subclass with a storage of its own kind, say.
PLAIN: frozenset[type] = frozenset((torch.Tensor, torch.nn.Parameter))

# Errors from reading an attribute of something that is no plain tensor, or of a tensor without memory (a sparse one),
# and from looking up a key with an argument that cannot be hashed.
UNREADABLE = (AttributeError, IndexError, RuntimeError, TypeError, ZeroDivisionError)

# The number of kinds under one key before the oldest is forgotten.
_MOST_KINDS = 16

Key = tuple[Any, ...]
Addresses = tuple[int, ...]
Tensors = tuple["torch.Tensor | None", ...]
# Sizes and strides of a tensor, None for those that may be others in a call of the same kind.
Pattern = tuple[list["int | None"], list["int | None"]]
Patterns = list[Pattern]
# A plan, the addresses of what is read, these tensors, x's shape and its rows, and the numbers that launches bring:
# eps, weight_offset and dropout_p, as far as the family has them; dropout_p only if something is dropped.
PlannedCall = tuple[Any, Addresses, Tensors, torch.Size, int, tuple[float, ...]]


class Known:
    """One kind of call.

    Attributes:
        fits: whether the tensors that are there are like those of this kind.
        present: picks them from all that there could be.
        patterns: their sizes and strides, as far as they are settled.
        trains: whether one of them requires a gradient, be gradients enabled or not.
        plan: what calls come to whose addresses are all aligned, or None.
    """

    __slots__ = ("_misaligned", "fits", "patterns", "plan", "present", "trains")

    def __init__(self, tensors: Tensors, patterns: Patterns) -> None:
        """See what some tensors are like.

        Args:
            tensors: all that there could be, None for those that are not there.
            patterns: of those that are there.
        """
        there = [tensor for tensor in tensors if tensor is not None]
        self.present: Callable[[Any], Any] = picking([index for index, each in enumerate(tensors) if each is not None])
        self.fits = _guard(there, patterns)
        self.patterns = patterns
        self.trains = any(tensor.requires_grad for tensor in there)
        self.plan: Any = None
        self._misaligned: dict[tuple[bool, ...], Any] = {}

    def plan_at(self, *addresses: int) -> Any:
        """Return the plan of calls with some misaligned address; None if there is no plan, or no memory."""
        return None if NOWHERE in addresses else self._misaligned.get(_alignment(addresses))

    def learn(self, addresses: Sequence[int], plan: object) -> None:
        """Have `plan` or `plan_at` give a plan."""
        if any(at & MISALIGNED for at in addresses):
            self._misaligned[_alignment(addresses)] = plan
        else:
            self.plan = plan


def remember(
    among: dispatch.Plans,
    key: Key | None,
    tensors: Tensors,
    free: Sequence[int],
    addresses: Sequence[int],
    plan: object,
) -> None:
    """Make calls known that are like one that was checked, if a guard can tell them from others.

    Args:
        among: the `dispatch.plans` that were in use when the call set out.
        key: what the call was looked up by; None for a call that cannot be known.
        tensors: all that it could bring, None for those that are not there.
        free: of each, how many of its leading sizes may be any.
        addresses: of each that is read in vectors, 0 for those that are not there.
        plan: what it came to.
    """
    if key is None or not all(each is None or (each.__class__ in PLAIN and not each.is_neg()) for each in tensors):
        return
    kinds: tuple[Known, ...] = among.get(key, ())
    patterns = [_pattern(tensor, any_) for tensor, any_ in zip(tensors, free, strict=True) if tensor is not None]
    # A single row fits a kind of many. Its stride means nothing, so that its plan is none for them.
    known = (one for one in kinds if one.patterns == patterns and one.fits(*one.present(tensors)))
    kind = next(known, None) or Known(tensors, patterns)
    kind.learn(addresses, plan)
    # The first one that fits is taken.
    dispatch.remember(among, key, (kind, *[one for one in kinds if one is not kind][: _MOST_KINDS - 1]))


def addresses_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Return where tensors lie, 0 for those that are not there."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _alignment(addresses: Sequence[int]) -> tuple[bool, ...]:
    return tuple([not at & MISALIGNED for at in addresses])


def picking(indices: Sequence[int]) -> Callable[[Any], Any]:
    """Return what picks the items at some indices as a tuple."""
    if not indices:
        return lambda items: ()
    # For one index, itemgetter picks the item rather than a tuple.
    return itemgetter(*indices) if len(indices) > 1 else itemgetter(slice(indices[0], indices[0] + 1))


def _guard(tensors: Sequence[torch.Tensor], patterns: Patterns) -> Fits:
    first = [next(index for index, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    once = sorted(set(first))
    fits = guard([tensors[index] for index in once], *zip(*[patterns[index] for index in once], strict=True))
    # An output that is an input, say: a guard takes no tensor twice.
    pick = picking(once)
    twice = [(index, other) for index, other in enumerate(first) if index != other]
    least = 2 if any(map(_is_ragged, tensors)) else 0
    if not twice and not least:
        return fits

    def fits_too(*others: torch.Tensor) -> bool:
        return others[0].shape[0] >= least and all(others[a] is others[b] for a, b in twice) and fits(*pick(others))

    return fits_too


def _is_ragged(tensor: torch.Tensor) -> bool:
    """Return True if a single row, whose stride means nothing, would be read by another kernel than these rows."""
    is_apart = tensor.dim() > 1 < tensor.shape[0] and tensor.stride(-1) == 1 and not tensor.is_contiguous()
    return is_apart and row_alignment(tensor.stride(0)) != row_alignment(tensor.shape[-1])


def _pattern(tensor: torch.Tensor, free: int) -> Pattern:
    """Return the pattern of a tensor of which so many leading sizes may be any."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if strides == contiguous_strides(shape):
        # How far apart dimensions are depends on the sizes of those behind them.
        outer = max(free - 1, 0)
        return [*[None] * free, *shape[free:]], [*[None] * outer, *strides[outer:]]
    if free == 1 and shape[0] > 1:
        return [None, *shape[1:]], [*strides]
    # The stride of one row means nothing, and several depend on the shape.
    return [*shape], [*strides]

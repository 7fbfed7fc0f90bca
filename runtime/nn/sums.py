"""Sums in a model's blocks, each computed together with the norm that follows it.

A block that `patch` fused adds by `add`. There the kernel makes the sum and, ahead of its call, the norm of it; the sum
goes on as any tensor, and the norm waits under its name. When the norm is called with that very tensor, unchanged, it
takes what waits; called with anything else, or after anything was changed, it computes. So what a block returns never
depends on a guess, and hooks run as they did. A guess that failed costs a norm's time, and a few of them end it.

The norm behind a sum that leaves its block is learned: the norm that is called with it the first time.

A sum of few elements is added alone: it takes the host longer to join the two than the GPU to read the sum once more.
"""

from __future__ import annotations

import logging
import weakref
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.known import PLAIN
from ..calls.recorded_sum import Ahead, add_ahead, norm_of_sum
from ..calls.straight import Operands, Options
from ..calls.traced import saved_tensors_hooks
from ..errors import NormforgeError
from ..selection.invariance import is_on

logger = logging.getLogger("normforge")

# Where a block keeps its sums' sites.
SITES = "_normforge_sites"

# How often in a row a norm that was computed ahead may go unused, and how often the norm behind a sum is looked for.
_MOST_MISSES = 3
_MOST_LOOKS = 16

# The fewest elements of a sum that is made together with its norm. Joined, a training step saves the GPU three passes
# over them, and costs the host some 50 us. Of the models of `python -m benchmarks models`, on an H200 at 2baeb10: at
# 8 Mi elements T5 and DiT gained 0.5 %, and Qwen3 under autocast, which is bound by the host, lost 9 %; at 12.3 Mi and
# more ViT gained 3 and 4 %, and others up to 2 %.
LEAST_ELEMENTS = 12 * 2**20


class Following(torch.nn.Module):
    """A norm of one dimension that takes what was computed ahead of its call.

    Attributes:
        reads: the parameters that its forward reads.
    """

    reads: tuple[str, ...] = ("weight",)

    normalized_shape: tuple[int, ...]

    def read(self) -> tuple[torch.nn.Parameter | None, torch.nn.Parameter | None]:
        """Its weight and bias, as they are registered."""
        parameters = self._parameters
        return parameters["weight"], parameters.get("bias")

    if TYPE_CHECKING:

        def options_for(self, total: torch.dtype, on: torch.Tensor) -> Options:
            """What it would compute of a sum of a dtype, where a tensor lies; each norm that follows has its own."""


class Site:
    """A place in a block's forward where two tensors are added.

    Attributes:
        inner: the name of the block's own norm that is called with the sum; None where that is to be learned.
    """

    __slots__ = ("_follower", "_looks", "_misses", "_off", "inner")

    def __init__(self, inner: str | None) -> None:
        self.inner = inner
        self._follower: weakref.ref[Following] | None = None
        self._looks = 0
        self._misses = 0
        self._off = False

    # What was learned is of the modules that it was learned of: a copy learns anew.
    def __reduce__(self) -> tuple[type[Site], tuple[str | None]]:
        return Site, (self.inner,)

    def add(self, block: torch.nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The sum, with the norm behind it on its way if that can be."""
        if waiting_sums:
            a, b = _again(a), _again(b)
        if self._off:
            return a + b
        if self.inner is not None:
            norm: Any = block._modules.get(self.inner)
        elif self._follower is not None:
            norm = self._follower()
        else:
            return self._looked_for(a + b)
        region = saved_tensors_hooks()
        if not isinstance(norm, Following) or not _callable_ahead(norm) or (region is not None and self.inner is None):
            return a + b
        if a.dtype is b.dtype or torch.promote_types(a.dtype, b.dtype) is a.dtype:
            x, residual = b, a
        else:
            x, residual = a, b
            if torch.promote_types(a.dtype, b.dtype) is not b.dtype:
                return a + b
        if x.shape != residual.shape or norm.normalized_shape[0] != x.shape[-1]:
            return a + b
        if self.inner is None and not _is_there(norm):
            return a + b
        made = self._made(norm, x, residual)
        if made is None:
            return a + b
        total, ahead, options = made
        _Waiting(self, norm, total, ahead, options, region)
        return total

    def _made(
        self, norm: Following, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, Ahead, Options] | None:
        options = norm.options_for(residual.dtype, x)
        weight, bias = norm.read()
        operands: Operands = (x, weight, bias, residual, None)
        try:
            if torch.is_inference_mode_enabled():
                # A tensor of inference mode has no version, by which one that was written to is known.
                with torch.inference_mode(False), torch.no_grad():
                    made = add_ahead(operands, options)
            else:
                made = add_ahead(operands, options)
        except NormforgeError as error:
            self._off = True
            logger.warning("a residual add and %s are left two kernels: %s", type(norm).__name__, error)
            return None
        return None if made is None else (*made, options)

    def _looked_for(self, total: torch.Tensor) -> torch.Tensor:
        self._looks += 1
        self._off = self._looks > _MOST_LOOKS
        if saved_tensors_hooks() is None:
            _Waiting(self, None, total, None, None, None)
        return total

    def found(self, norm: Following) -> None:
        """The norm that was called with the sum."""
        self._follower = weakref.ref(norm)
        self._misses = 0

    def taken(self) -> None:
        """What was computed ahead was used."""
        self._misses = self._looks = 0

    def missed(self) -> None:
        """It was not."""
        self._misses += 1
        if self._misses >= _MOST_MISSES:
            # Another norm may follow since the block was tried: one that a decoder calls if there is an encoder, say.
            self.inner = self._follower = None


def add(block: torch.nn.Module, index: int, a: Any, b: Any) -> Any:
    """What stands in a fused block's forward for a + b.

    Args:
        block: the block.
        index: which of its sites.
        a: whatever is added; fused are two plain tensors.
        b: likewise.
    """
    # Under torch.compile the graph is to show the sum, for whoever fuses there.
    if (
        is_dynamo_compiling()
        or not PLAIN.issuperset((a.__class__, b.__class__))
        or a.numel() < LEAST_ELEMENTS
        or a.is_nested
        or is_on()
    ):
        # Joined, a norm is of the sum before it is rounded: under batch invariance none is, be there many rows or few.
        return a + b
    sites: Any = block.__dict__.get(SITES)
    return a + b if sites is None else sites[index].add(block, a, b)


def taken(norm: Following, x: Any) -> torch.Tensor | None:
    """What was computed ahead of a norm's call with x, if it is what the call would compute; None if nothing was."""
    waiting = waiting_sums.get(id(x))
    total = None if waiting is None else waiting.total()
    return None if waiting is None or total is None or total is not x else waiting.taken(norm, total)


def is_waited_for(x: torch.Tensor) -> bool:
    """Whether a norm of x is on its way to that norm's call."""
    waiting = waiting_sums.get(id(x))
    return waiting is not None and waiting.is_ahead and waiting.total() is x


class _Waiting:
    """What is known of a sum while the tensor lives.

    Attributes:
        total: the sum.
        again: the sum as an output of its norm, once that has taken its y; the next add's operand.
    """

    __slots__ = ("_ahead", "_norm", "_options", "_region", "_site", "_state", "again", "total")

    def __init__(
        self,
        site: Site,
        norm: Following | None,
        total: torch.Tensor,
        ahead: Ahead | None,
        options: Options | None,
        region: object,
    ) -> None:
        self.total = _Total(total)
        self.again: torch.Tensor | None = None
        self._site = site
        self._norm = norm
        self._ahead = ahead
        self._options = options
        self._region = region
        self._state = None if norm is None else _state(norm, total)
        waiting_sums[self.total.key] = self

    def taken(self, norm: Following, x: torch.Tensor) -> torch.Tensor | None:
        ahead, options = self._ahead, self._options
        if self._norm is None:
            del waiting_sums[self.total.key]
            self._site.found(norm)
        if ahead is None or options is None or self._norm is not norm:
            return None
        del waiting_sums[self.total.key]
        # A hook is another in each checkpoint, and in its second run.
        if not _same(self._state, _state(norm, x)) or saved_tensors_hooks() != self._region:
            self._site.missed()
            return None
        self._site.taken()
        y, statistics = ahead
        if statistics is None:
            return y
        y, self.again = norm_of_sum(options, ahead, x, *norm.read())
        self._ahead = None
        waiting_sums[self.total.key] = self
        return y

    @property
    def is_ahead(self) -> bool:
        """Whether a norm of the sum was made, and not taken yet."""
        return self._ahead is not None

    def still(self) -> bool:
        """Whether the sum is what it was when its norm took it."""
        total = self.total()
        norm = self._norm
        return total is not None and norm is not None and _same(self._state, _state(norm, total))

    def forgotten(self) -> None:
        """The tensor is gone."""
        # A checkpoint's second run may stop between the two.
        if self._ahead is not None and self._region is None:
            self._site.missed()


class _Total(weakref.ref[torch.Tensor]):
    """A sum, and what it waits under."""

    __slots__ = ("key",)

    def __new__(cls, total: torch.Tensor) -> _Total:
        return super().__new__(cls, total, _forget)

    def __init__(self, total: torch.Tensor) -> None:
        # Typeshed gives the constructor of weakref.ref no second argument, which that of a subclass is handed too.
        reference: Any = super()
        reference.__init__(total, _forget)
        self.key = id(total)


# By the identity of the sum. What a thread makes, another does not find: it has other tensors.
waiting_sums: dict[int, _Waiting] = {}


# The dictionary is a default so that it is still there when Python ends.
def _forget(total: Any, by_identity: dict[int, _Waiting] = waiting_sums) -> None:
    waiting = by_identity.get(total.key)
    if waiting is not None and waiting.total is total:
        del by_identity[total.key]
        waiting.forgotten()


def _again(operand: torch.Tensor) -> torch.Tensor:
    """An operand, or the same sum as an output of the norm that took its y, whose backward kernel adds gradients."""
    waiting = waiting_sums.get(id(operand))
    if waiting is None or waiting.again is None or waiting.total() is not operand:
        return operand
    del waiting_sums[id(operand)]
    return waiting.again if waiting.still() else operand


def _state(norm: Following, total: torch.Tensor) -> tuple[Any, ...]:
    """What must not change between a sum and its norm's call for the norm to be what was computed."""
    weight, bias = norm.read()
    return (
        total.grad_fn,
        weight,
        bias,
        total._version,
        _version(weight),
        _version(bias),
        total.requires_grad,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
    )


def _version(parameter: torch.nn.Parameter | None) -> int:
    # Those of a model that was made in inference mode have none.
    return 0 if parameter is None or parameter.is_inference() else parameter._version


def _same(before: tuple[Any, ...] | None, after: tuple[Any, ...]) -> bool:
    # Tensors are compared by identity: `==` of tuples would ask them, which is a kernel.
    return before is not None and before[3:] == after[3:] and all(map(is_, before[:3], after[:3]))


def _callable_ahead(norm: Following) -> bool:
    """Whether calling a norm is calling its forward: what runs before it may change the input or the weight."""
    return not (
        norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks or "forward" in norm.__dict__
    ) and all(map(norm._parameters.__contains__, norm.reads))  # A parameter that is made of others is not among them.


def _is_there(norm: Following) -> bool:
    """Whether the weight of a norm beyond the block is there before its own block is called.

    FSDP gathers it meanwhile, with a parameter of the same class whose memory is not written yet.
    """
    return all(
        parameter is None or (parameter.__class__ in PLAIN and "_fsdp_flattened" not in parameter.__dict__)
        for parameter in norm._parameters.values()
    )

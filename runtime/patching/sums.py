"""Sums in a model's blocks, each computed together with a norm.

A block that `patch` fused adds, and calls its norms, by a `Sums`. Three things are fused:

- a sum, and the norm that the forward calls directly behind the sum: one kernel computes both. No other code runs
  between the two (see `text`), so the result equals that of the norm's own call;
- a norm, and the sum of its result, which nothing else reads: one kernel computes the sum, and rounds once. The kernel
  also computes the norm behind the sum, if both norms have the same options;
- the gradients of a norm's input that is added again later, as a residual: the norm's backward kernel adds the
  residual's gradient. Forward, the norm is computed in its call.

A sum that leaves its block is not fused with the norm behind the block: a model may change the sum in between, by hooks
or by `.data`, without a trace.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.backend import is_served
from ..calls.plan import PLAIN
from ..calls.traced import global_hooks, result_dtype
from ..dtypes import HALVES
from ..errors import NormforgeError
from ..families import post_add
from ..families.operands import DEFAULT_EPS, Options
from ..families.plain import Ahead, add_ahead, norm_of_sum, norm_of_summand
from ..families.plain_modules import LayerNorm, RMSNorm
from ..selection.invariance import is_on
from ..settings import fuse_from
from .huggingface import ANY_LENGTH, HuggingFaceRMSNorm, T5RMSNorm

logger = logging.getLogger("normforge")


class _Joined(NamedTuple):
    """A sum, and the norm of the sum, which the forward calls next."""

    total: torch.Tensor
    ahead: Ahead
    norm: torch.nn.Module
    options: Options


class _Summand(NamedTuple):
    """A norm's input x, the same tensor as an output of the norm, and what x was then."""

    x: torch.Tensor
    again: torch.Tensor
    state: tuple[Any, ...]

    def in_place_of(self, operand: Any) -> Any:
        """Return an operand, or x as an output of its norm, whose backward kernel adds gradients."""
        # Both share memory, so that a write to one, by `.data` say, shows in the other.
        return self.again if operand is self.x and _state(self.x) == self.state else operand


class _Later(NamedTuple):
    """The result of a norm, which the sum that reads it computes."""

    norm: Any
    x: Any


class Sums:
    """The sums and norms of one call of a block's forward."""

    def __init__(self, block: torch.nn.Module) -> None:
        self._block = block
        self._joined: _Joined | None = None
        self._summand: _Summand | None = None
        # Under torch.compile the graph shows sums and norms, for passes that fuse there.
        self._least = None if is_dynamo_compiling() else fuse_from()

    def add(self, name: str | None, a: Any, b: Any) -> Any:
        """Return a + b.

        Args:
            name: the norm that the forward calls next, with the sum; None if it calls none.
            a: the left operand; two plain tensors are fused.
            b: the right operand.
        """
        if self._summand is not None:
            a, b = map(self._summand.in_place_of, (a, b))
        self._joined = None
        if _Later in (a.__class__, b.__class__):
            total = self._add_later(name, a, b) if a.__class__ is _Later else self._add_later(name, b, a)
            if total is not None:
                return total
            a, b = (self.normalise(*each) if each.__class__ is _Later else each for each in (a, b))
        if name is not None and self._is_large(a, b):
            self._joined = self._join(name, a, b)
        return a + b if self._joined is None else self._joined.total

    def normalise(self, norm: Any, x: Any) -> Any:
        """Return norm(x).

        Args:
            norm: the norm, or whatever else the forward calls by its name.
            x: its input.
        """
        joined, self._joined = self._joined, None
        outputs = None
        if joined is not None and joined.total is x and joined.norm is norm:
            y, statistics = joined.ahead
            if statistics is None:
                return y
            outputs = norm_of_sum(joined.options, joined.ahead, x, *vectors_of(norm))
        elif self._is_large(x) and torch.is_grad_enabled() and x.requires_grad and is_bare(norm):
            outputs = norm_of_summand((x, *vectors_of(norm), None, None), options_of(norm, x.dtype, x))
        if outputs is None:
            return norm(x)
        y, again = outputs
        self._summand = _Summand(x, again, _state(x))
        return y

    def normalise_later(self, norm: Any, x: Any) -> Any:
        """Return norm(x), or what `add` computes together with the sum of norm(x), which the forward calls next."""
        # Compiled graphs show the norm and the sum to the passes. A sum that joined this norm computed its result.
        is_next = self._is_large(x) and self._joined is None and is_bare(norm)
        return _Later(norm, x) if is_next else self.normalise(norm, x)

    def forget(self) -> None:
        """Forget the norm of the last sum: the forward took a branch, which may run any code."""
        self._joined = None

    def _is_large(self, *tensors: Any) -> bool:
        """Return True if plain tensors, of at least as many elements as are fused, are all there is."""
        return (
            # The size first: a model that decodes calls this with few elements.
            self._least is not None
            and PLAIN.issuperset((tensors[0].__class__,))
            and bool(tensors[0].numel() >= self._least)
            and PLAIN.issuperset([each.__class__ for each in tensors])
            and not any(each.is_nested for each in tensors)
            # Batch invariance: a row's bits may not depend on the number of rows, and fusing sums does.
            and not is_on()
        )

    def _join(self, name: str, a: torch.Tensor, b: torch.Tensor) -> _Joined | None:
        norm: Any = self._block._modules.get(name)
        if not is_bare(norm):
            return None
        dtype = torch.promote_types(a.dtype, b.dtype)
        x, residual = (b, a) if dtype is a.dtype else (a, b)
        if dtype is not residual.dtype or x.shape != residual.shape or not is_of_length(norm, x.shape[-1]):
            return None
        options = options_of(norm, dtype, x)
        launched = self._fused(norm, add_ahead, (x, *vectors_of(norm), residual, None), options)
        return None if launched is None else _Joined(launched[0], launched[1], norm, options)

    def _add_later(self, name: str | None, later: _Later, residual: Any) -> torch.Tensor | None:
        """Return the sum of a norm's result and a residual, also with the norm behind; None if no kernel can."""
        norm, x = later
        if not is_taken(norm, x, residual) or x.shape != residual.shape:
            return None
        options = word, eps, weight_offset, dtype, cast = options_of(norm, x.dtype, x)
        operands = (x, *vectors_of(norm), residual)
        behind: Any = None if name is None else self._block._modules.get(name)
        # The kernel of two norms has one set of options, and one dtype.
        is_alike = is_bare(behind) and is_taken(behind, x) and options_of(behind, x.dtype, x) == options
        if is_alike and x.dtype is dtype is residual.dtype:
            of_both = (word, eps, weight_offset, cast, "none", None, None)
            launched = self._fused(norm, post_add.add_ahead, (*operands, *vectors_of(behind), None), of_both)
            if launched is not None:
                self._joined = _Joined(launched[0], launched[1], behind, options)
                return self._joined.total
        # A norm that rounds rows first would round them to the residual's dtype.
        if dtype is not residual.dtype and not (rounds_once(norm) and is_within(dtype, residual.dtype)):
            return None
        given = (word, eps, weight_offset, None, cast, "post_add", None)
        total: torch.Tensor | None = self._fused(norm, post_add.normalise, (*operands, None), given)
        return total

    def _fused(self, norm: torch.nn.Module, launch: Callable[..., Any], operands: tuple[Any, ...], options: Any) -> Any:
        return fused(self._block, norm, "a residual add", launch, operands, options)


# Blocks with norms that no kernel computes together with what is beside them.
_unserved: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def fused(block: torch.nn.Module, norm: torch.nn.Module, beside: str, launch: Callable[..., Any], *args: Any) -> Any:
    """Compute a norm together with what is beside it; return None in a block that no kernel serves."""
    if block in _unserved:
        return None
    try:
        return launch(*args)
    except NormforgeError as error:
        _unserved.add(block)
        logger.warning("%s and %s are left two kernels: %s", beside, type(norm).__name__, error)
        return None


def _state(x: torch.Tensor) -> tuple[Any, ...]:
    """Return x's memory, layout, version and autograd state, to detect a change of x."""
    return (x.data_ptr(), x.dtype, x.shape, x.stride(), x._version, x.requires_grad, x.grad_fn)


# The norms that a sum can be computed together with, and the options of their calls

_FORWARDS = (LayerNorm.forward, RMSNorm.forward, HuggingFaceRMSNorm.forward)


def may_follow(module: Any) -> bool:
    """Return True if a sum can be computed together with a module, which is then a norm of ours over one dimension."""
    if getattr(type(module), "forward", None) not in _FORWARDS or "forward" in vars(module):
        return False
    norm: Any = module
    # An x_bias, and a LayerNorm's weight_offset, need a second call of the functional API.
    return not (
        len(norm.normalized_shape) != 1 or norm._has_x_bias or (isinstance(norm, LayerNorm) and norm.weight_offset)
    )


def rounds_once(norm: Any) -> bool:
    """Return True if a norm that `may_follow` knows returns x's dtype, rounded behind the weight."""
    rounds_first = not isinstance(norm, LayerNorm) and norm.cast_before_weight
    return norm.cast == "after_weight" and not rounds_first and not isinstance(norm, T5RMSNorm)


def is_taken(norm: Any, x: Any, *operands: Any) -> bool:
    """Return True if a kernel takes x, with operands beside x, and the vectors of such a norm, which is bare."""
    return (
        PLAIN.issuperset([each.__class__ for each in (x, *operands)])
        and is_served((x, *operands, *vectors_of(norm)))
        and is_of_length(norm, x.shape[-1])
    )


def is_within(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Return True if a wide dtype is what torch computes sums of both dtypes in."""
    return torch.promote_types(dtype, wide) is wide


def is_of_length(norm: Any, n: int) -> bool:
    """Return True if such a norm takes rows of n elements."""
    return norm.normalized_shape[0] in (ANY_LENGTH, n)


def vectors_of(norm: torch.nn.Module) -> tuple[torch.nn.Parameter | None, torch.nn.Parameter | None]:
    """Return the weight and the bias of a bare norm."""
    return norm._parameters.get("weight"), norm._parameters.get("bias")


def is_bare(module: Any) -> bool:
    """Return True if calling a module does no more than its forward, which `may_follow` knows."""
    return (
        may_follow(module)
        and 0.0 <= (module.eps or 0.0) < float("inf")
        and not (module._forward_pre_hooks or module._forward_hooks or global_hooks())
        and not (module._backward_pre_hooks or module._backward_hooks)
        # A parametrised weight is not in `_parameters`.
        and ("weight" in module._parameters or module.weight is None)
        and ("bias" in module._parameters or not isinstance(module, LayerNorm))
    )


def options_of(norm: Any, total: torch.dtype, on: torch.Tensor) -> tuple[str, float, float, torch.dtype, str]:
    """Return the options of a norm's call with rows of a dtype, on the device of a tensor."""
    word, weight = "layer" if isinstance(norm, LayerNorm) else "rms", norm.weight
    rounds_first = word == "rms" and norm.cast_before_weight and weight is not None
    if isinstance(norm, T5RMSNorm):
        y_dtype = rounded = weight.dtype
    else:
        # An operand may have 16 bits while the sum has 32; rows of 32 bits are not rounded before the weight.
        rounded = total
        y_dtype = torch.promote_types(total, weight.dtype) if rounds_first else result_dtype(word, on) or total
    cast = "before_weight" if rounds_first else norm.cast
    eps = DEFAULT_EPS if norm.eps is None else float(norm.eps)
    return (word, eps, norm.weight_offset, y_dtype, cast if rounded in HALVES else "after_weight")

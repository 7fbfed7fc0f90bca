"""The operators of norms of queries and keys with rotary embeddings, and of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..upstream.torch_internals import eager_only
from .kernels import register_autograd

Tensors = tuple[torch.Tensor, ...]

_NAME = "qk_norm_rope"
_TENSORS = "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? positions"
_OPTIONS = "str norm, float eps, bool interleaved, int rotary_dim, float weight_offset, str cast"
# How many of the arguments are tensors.
_COUNT = _TENSORS.count("Tensor")


def register(define: Callable[..., None], library: Any) -> None:
    """Define both operators by a function, and have a library record the first one's gradients."""
    forward, backward = (
        f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
        f"{_TENSORS}, {_OPTIONS}, bool[] due) -> Tensor[]",
    )
    define(_NAME, lambda name: f"{name}{forward}", _run, _fake, _run)
    define(
        f"{_NAME}_backward", lambda name: f"{name}(Tensor dq_out, Tensor dk_out, {backward}", _back, _fake_back, _back
    )
    register_autograd(library, _NAME, _differentiate, _keep)


@eager_only
def _run(*arguments: Any) -> Tensors:
    from ..families import rotary

    return rotary.launched(arguments[:_COUNT], arguments[_COUNT:])


def _fake(q: torch.Tensor, k: torch.Tensor, *_: Any) -> Tensors:
    return tuple([each.new_empty(each.shape) for each in (q, k)])


@eager_only
def _back(*arguments: Any) -> list[torch.Tensor]:
    from ..families import rotary

    dq_out, dk_out, *others = arguments
    *options, due = others[_COUNT:]
    grads = rotary.gradients(
        tuple(others[:_COUNT]), tuple(options), dq_out, dk_out, (True, True, *due, *[False] * 3), False
    )
    return [each for each in grads if each is not None]


def _fake_back(dq_out: torch.Tensor, dk_out: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    operands, due = arguments[:4], (True, True, *arguments[-1])
    return [each.new_empty(each.shape) for each, is_due in zip(operands, due, strict=True) if is_due]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.options = inputs[_COUNT:]
    # A gradient that did not arrive stays None.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_COUNT])


def _differentiate(ctx: Any, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None) -> tuple[Any, ...]:
    from ..families import rotary

    due = ctx.needs_input_grad[:_COUNT]
    grads = rotary.gradients(ctx.saved_tensors, ctx.options, dq_out, dk_out, due, torch.is_grad_enabled())
    return (*grads, *[None] * len(ctx.options))

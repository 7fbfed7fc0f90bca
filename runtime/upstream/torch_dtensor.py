"""DTensors of existing parts, such as results: `DTensor.from_local` takes 24 us, and an operator of torch 40."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .dynamo_guards import contiguous_strides
from .torch_internals import applied


def assembled(
    part: torch.Tensor, like: Any, shape: torch.Size, placements: Sequence[Any], strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Return the DTensor that this rank has a part of; its gradient is the part's gradient.

    Args:
        part: contiguous, if no strides are given.
        like: a DTensor on the same mesh.
        shape: of the whole.
        placements: of the whole.
        strides: of the whole; None if it is contiguous.
    """
    if strides is not None or is_dynamo_compiling() or not _is_like(part, like, shape, placements):
        described = {"run_check": False, "shape": shape, "stride": strides or contiguous_strides(shape)}
        dtensor: torch.Tensor = type(like).from_local(part, like.device_mesh, placements, **described)
        return dtensor
    whole: torch.Tensor = applied(_Assembled)(part, like) if part.requires_grad else _wrapped(part, like)
    return whole


def settled(whole: Any) -> Any:
    """Return a DTensor whose part no collective is still writing; torch's operators wait for it, and kernels do not."""
    if hasattr(whole._local_tensor, "trigger_wait") and not is_dynamo_compiling():
        whole._local_tensor = whole._local_tensor.trigger_wait()
    return whole


def _is_like(part: torch.Tensor, like: Any, shape: torch.Size, placements: Sequence[Any]) -> bool:
    """Return True if the whole is described as `like` is, and needs no description of its own."""
    meta = getattr(getattr(like, "_spec", None), "tensor_meta", None)
    described = None if meta is None else (like.placements, meta.shape, meta.dtype)
    return described == (placements, shape, part.dtype) and like.is_contiguous()


def _wrapped(part: torch.Tensor, like: Any) -> torch.Tensor:
    # Torch's from_local does this too: the tensor inside has no part in autograd, and its description is a copy.
    whole: torch.Tensor = type(like)(part.detach(), copy.copy(like._spec), requires_grad=False)
    return whole


class _Assembled(torch.autograd.Function):
    """A `DTensor.from_local` for the parts of a tensor that is like an existing DTensor."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, like: Any) -> torch.Tensor:
        ctx.placements = like.placements
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        return _wrapped(part, like)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor | None, None]:
        if gradient is not None and gradient.placements != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        return None if gradient is None else settled(gradient).to_local(), None

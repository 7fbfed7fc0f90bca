"""DTensors of parts that are there, as results are: `DTensor.from_local` takes 24 us, and an operator of torch's 40."""

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
    """The DTensor that this rank has a part of; its gradient is that of the part.

    Args:
        part: contiguous, if no strides are given.
        like: a DTensor on the same mesh.
        shape: of the whole.
        placements: of the whole.
        strides: of the whole; None if it is contiguous.
    """
    if strides is not None or is_dynamo_compiling() or not _is_like(part, like, shape, placements):
        described = {"run_check": False, "shape": shape, "stride": strides or contiguous_strides(shape)}
        made: torch.Tensor = type(like).from_local(part, like.device_mesh, placements, **described)
        return made
    whole: torch.Tensor = applied(_Assembled)(part, like) if part.requires_grad else _wrapped(part, like)
    return whole


def _is_like(part: torch.Tensor, like: Any, shape: torch.Size, placements: Sequence[Any]) -> bool:
    """Return True if the whole is described as `like` is, and needs no description of its own."""
    spec: Any = getattr(like, "_spec", None)
    meta = getattr(spec, "tensor_meta", None)
    if meta is None or spec.placements != placements:
        return False
    return meta.shape == shape and meta.dtype is part.dtype and like.is_contiguous()


def _wrapped(part: torch.Tensor, like: Any) -> torch.Tensor:
    # As torch does in from_local: the tensor inside has no part in autograd, and its description is its own.
    whole: torch.Tensor = type(like)(part.detach(), copy.copy(like._spec), requires_grad=False)
    return whole


class _Assembled(torch.autograd.Function):
    """`DTensor.from_local` of the parts of a tensor that is like one that is there."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, like: Any) -> torch.Tensor:
        ctx.placements = like.placements
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        return _wrapped(part, like)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.placements != ctx.placements:
            gradient = gradient.redistribute(placements=ctx.placements)
        return gradient.to_local(), None

"""The functional API where no kernel runs: torch's own operators."""

from __future__ import annotations

import torch
from torch.nn import functional

from .codegen.model import Norm


def normalise(
    norm: Norm,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `autograd.normalise` returns of the same arguments, computed by torch."""
    if residual is None and out_dtype is None:
        return _operator(norm, x, shape, weight, bias, eps), None
    total = x.to(torch.promote_types(x.dtype, torch.float32))
    residual_out = None
    if residual is not None:
        # As in the kernels, the norm is of the sum before it is rounded to residual's dtype.
        total = total + residual.to(torch.promote_types(residual.dtype, torch.float32))
        residual_out = total.to(residual.dtype)
    return _operator(norm, total, shape, weight, bias, eps).to(out_dtype or x.dtype), residual_out


def _operator(
    norm: Norm,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
) -> torch.Tensor:
    if not norm.centres:
        return functional.rms_norm(x, list(shape), weight, eps)
    assert eps is not None
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    if any(parameter.dtype != x.dtype for parameter in parameters):
        # The operator takes parameters in x's dtype, or both in fp32 beside a 16-bit x; the kernels take any.
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return functional.layer_norm(x, list(shape), weight, bias, eps)

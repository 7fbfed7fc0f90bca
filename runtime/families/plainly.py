"""A test for correct calls of the functional API that uses no global of normforge.

Compiled code guards every global that TorchDynamo traced, except Python's and torch's: two or three guards each, and
0.1 us per guard that is not in the processor's cache. Tracing `check_normalised` leaves 110 guards.
"""

from __future__ import annotations

from typing import Any

import torch

from .operands import Operands, Options


def is_plain(operands: Operands, normalized_shape: Any, options: Options) -> bool:
    """Return True if `check_normalised` would accept a call of one dimension of plain tensors without float64.

    False does not mean that the call is wrong. TorchDynamo of torch 2.11 knows the type of numbers, but no __class__.
    """
    x, weight, bias, residual, x_bias = operands
    norm, eps, weight_offset, _, cast = options
    if normalized_shape.__class__ not in (tuple, list, torch.Size) or len(normalized_shape) != 1:
        return False
    (n,) = normalized_shape
    if type(n) is not int:
        return False
    is_told = norm == "rms" if eps is None else type(eps) is float and 0.0 <= eps <= 1.0
    if type(weight_offset) is not float or cast not in ("after_weight", "before_weight") or not is_told:
        return False
    if weight_offset != 0.0 and (norm != "rms" or weight is None or not -1.0 <= weight_offset <= 1.0):
        return False
    if x.__class__ not in (torch.Tensor, torch.nn.Parameter):
        return False
    for tensor in operands:
        if tensor is not None and not (
            tensor.__class__ in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and tensor.device == x.device
        ):
            return False
    shape = x.shape
    if len(shape) == 0 or n <= 0 or shape[-1] != n or (residual is not None and residual.shape != shape):
        return False
    for vector in (weight, bias, x_bias):
        if vector is not None and (len(vector.shape) != 1 or vector.shape[0] != n):
            return False
    return True

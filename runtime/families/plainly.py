"""Whether nothing can be said against a call of the functional API, asked without a name of normforge's.

TorchDynamo asks again, in each call of what it compiled, for every name that it came across, but for Python's own and
torch's: two or three guards each, and 0.1 us a guard where the processor has to fetch them. To follow
`check_normalised` leaves 110.
"""

from __future__ import annotations

from typing import Any

import torch

from .operands import Operands, Options


def is_plain(operands: Operands, normalized_shape: Any, options: Options) -> bool:
    """Whether `check_normalised` would surely pass a call, of one dimension of plain tensors, no float64 among them.

    A call that is not plain may be right all the same. Of numbers TorchDynamo of 2.11 knows the type, and no __class__.
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

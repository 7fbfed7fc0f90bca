"""Calls that add a residual to the normalised rows: the row of the family; `calls/road.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function

from ..calls import native, road
from ..calls.argument_checks import check_tensor
from ..calls.outputs import rounded
from ..calls.record import BackwardPass, Gradients, Recording
from ..calls.road import calls_of, launch_recorded
from ..calls.traced import is_dynamo_compiling
from ..codegen.parameters import ADDED
from . import eager
from .operands import DEFAULT_EPS, Operands
from .plain import WANTS, gradients_of
from .plain_calls import handed_on, is_handed_on, normalise_family, with_offset


def _saved(operands: road.Operands, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    x, weight, _, _, x_bias = operands
    return x, weight, x_bias


def _args(options: road.Options, dtypes: tuple[torch.dtype | None, ...], y_dtype: torch.dtype) -> Any:
    norm, _, weight_offset, _, cast, *_ = options
    return norm, weight_offset, cast, dtypes


def _gradients(call: BackwardPass) -> Gradients:
    x, weight, x_bias, statistics = call.saved
    norm, weight_offset, cast, dtypes = call.args
    due = call.due
    # The residual is no operand of the norm.
    of_norm = *due[:3], due[4]
    wants = WANTS[of_norm]
    options = (norm, weight_offset, cast, None, dtypes[2], wants)
    grads: Any = (None,) * 4
    if wants:
        grads = gradients_of(options, call.dy, x, weight, statistics, x_bias, None)
    dx, dweight, dbias, dx_bias, *_ = grads
    return rounded((dx, dweight, dbias, call.dy, dx_bias), dtypes, due)


CALLS = calls_of(
    ADDED,
    eager=eager.added,
    saved=_saved,
    args=_args,
    recording=Recording(launch_recorded, _gradients),
)


def normalise(operands: Operands, options: Any, *shape: Sequence[int]) -> Any:
    """Run a call of a public function, or of a module with its normalized_shape; return y in residual's dtype."""
    norm, eps, weight_offset, _, cast, fadd, saves = options
    residual = operands[3]
    eps = DEFAULT_EPS if eps is None else eps
    given = (norm, eps, weight_offset, getattr(residual, "dtype", None), cast, fadd, saves)
    result = None if is_dynamo_compiling() else native.calls.added.normalise(operands, given, *shape)
    if result is not None:
        return result
    if is_handed_on(operands):
        if shape:
            return handle_torch_function(normalise, operands, operands, options, *shape)
        return handed_on(f"{norm}_norm_add", operands, road.named(CALLS, operands, given), positional=2)
    check_tensor("residual", residual)
    if norm == "layer" and weight_offset != 0.0:
        return normalise(*with_offset(operands, given), *shape)
    return normalise_family(CALLS, operands, given, *shape)

"""A backward run of one problem: its operands, and its gradients held against the fp64 reference."""

from __future__ import annotations

from typing import Any

import torch

from .. import reference
from ..calls import api, backward
from ..calls.outputs import NormGradients
from ..codegen.model import Norm
from ..selection import dispatch
from .compare import Finding, compare_gradients
from .problem import Problem, gradients_in, inputs
from .result import Run


def prepare_backward(problem: Problem, device: torch.device) -> Run[NormGradients]:
    """Run a problem forward for its statistics, and make every gradient it has ready to be computed.

    The gradients of a fused add are those of the stored sum, which is what the backward kernel reads. That sum holds
    x_bias already, so that its gradient is dx summed over rows, before dx is rounded, as autograd computes it.

    Raises:
        NormforgeError: whatever the forward call raises.
    """
    arguments = inputs(problem, device)
    is_layer = problem.norm is Norm.LAYER
    forward = (api.layernorm2d_fwd if is_layer else api.rmsnorm2d_fwd)(**arguments | {"save_mv": True})
    operands: dict[str, Any] = {"x": arguments["x"], "weight": arguments["weight"], "rstd": forward.rstd}
    if is_layer:
        operands["mean"] = forward.mean
    if problem.fadd.stores:
        operands["x"] = forward.residual_out
    elif problem.x_bias:
        operands["x_bias"] = arguments["x_bias"]
    operands |= gradients_in(problem, device)
    wants = ["dx", "dweight", *(["dbias"] if is_layer else []), *(["dx_bias"] if "x_bias" in operands else [])]
    run = backward.layernorm2d_bwd if is_layer else backward.rmsnorm2d_bwd

    def call() -> NormGradients:
        if not (problem.fadd.stores and problem.x_bias):
            return run(**operands, wants=wants)
        gradients = run(**operands, wants=wants, dx_dtype=torch.float32)
        dx, dtype = gradients.dx, arguments["x_bias"].dtype
        assert dx is not None
        return gradients._replace(dx=dx.to(dtype), dx_bias=dx.sum(0).to(dtype))

    oracle = reference.layernorm2d_bwd if is_layer else reference.rmsnorm2d_bwd

    def validate(gradients: NormGradients) -> tuple[Finding, ...]:
        return tuple(compare_gradients(gradients, oracle(**operands)))

    mode = backward.mode_of(problem.norm, operands["x"], "x_bias" in operands, problem.fadd)
    return Run(
        entry=lambda: dispatch.find(mode, problem.n),
        call=call,
        validate=validate,
        operands=tuple(operands.values()),
    )

"""A backward run of one problem: its gradients held against the fp64 reference, and timed."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import api, backward, dispatch, reference
from .codegen.model import Norm
from .compare import compare_gradients
from .machine import Machine
from .output import NormGradients
from .problem import Problem, gradients_in, inputs
from .result import Result
from .timing import median_ms


def solve_backward(problem: Problem, machine: Machine, *, validate: bool, warmup: int, repeat: int) -> Result:
    """Run a problem forward for its statistics, then time and check every gradient it has.

    The gradients of a fused add are those of the stored sum, which is what the backward kernel reads.

    Raises:
        NormforgeError: whatever the calls raise.
    """
    arguments = inputs(problem, machine.device)
    is_layer = problem.norm is Norm.LAYER
    forward = (api.layernorm2d_fwd if is_layer else api.rmsnorm2d_fwd)(**arguments | {"save_mv": True})
    operands: dict[str, Any] = {"x": arguments["x"], "weight": arguments["weight"], "rstd": forward.rstd}
    if is_layer:
        operands["mean"] = forward.mean
    if problem.fadd.stores:
        operands["x"] = forward.residual_out
    elif problem.x_bias:
        operands["x_bias"] = arguments["x_bias"]
    operands |= gradients_in(problem, machine.device)
    wants = ["dx", "dweight", *(["dbias"] if is_layer else []), *(["dx_bias"] if "x_bias" in operands else [])]
    run = backward.layernorm2d_bwd if is_layer else backward.rmsnorm2d_bwd

    def call() -> NormGradients:
        return run(**operands, wants=wants)

    begin = time.perf_counter()
    gradients = call()
    interpreted_ms = (time.perf_counter() - begin) * 1e3
    oracle = reference.layernorm2d_bwd if is_layer else reference.rmsnorm2d_bwd
    findings = tuple(compare_gradients(gradients, oracle(**operands))) if validate else ()
    ms = interpreted_ms if machine.interpreted else median_ms(call, warmup=warmup, repeat=repeat)
    entry = dispatch.find(backward.mode_of(problem.norm, operands["x"], "x_bias" in operands, problem.fadd), problem.n)
    moved = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*operands.values(), *gradients)
        if isinstance(tensor, torch.Tensor)
    )
    return Result(entry.name, entry.kernel, findings, ms, None if machine.interpreted else moved / ms / 1e6)

"""The random tensors of one problem of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..codegen.families import Kind, Parameter
from ..codegen.parameters import BACKWARD, QUANTISED, family_of
from ..codegen.values import DType
from ..dtypes import TORCH_DTYPES, arguments_of
from .problem import Problem

SEED = 11939


def inputs(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Draw the arguments of the forward call as ck_tile does: uniform in ±0.5, and the smooth scale in ±1."""
    draw = _drawer(problem, device, SEED)
    dropped = {"dropout_p": problem.dropout_p} if problem.mode.dropout else {}
    laid = {"scale_layout": problem.scale_layout} if family_of(problem.mode) is QUANTISED else {}
    return {**arguments_of(problem.mode, draw), "eps": problem.eps, **dropped, **laid}


def gradients_in(problem: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw the incoming gradients, uniform in ±0.5: dy, scales of an fp8 dy, and the gradient of a stored sum."""
    draw = _drawer(problem, device, SEED + 1)
    names = ["dy", *["dy_scale"] * problem.dy_format.is_fp8, *["dresidual_out"] * problem.mode.fadd.stores]
    return {name: draw(BACKWARD[name]) for name in names}


def poisoned_outputs(problem: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `out` and `residual_out`, filled with a value that no kernel writes: an unwritten element is found."""

    def poisoned(stride: int, dtype: DType) -> torch.Tensor:
        poison = torch.tensor(-128 if dtype.is_int else float("nan"), device=device).to(TORCH_DTYPES[dtype])
        return problem.rows_in(poison.repeat(problem.tokens, stride))

    strides, mode = problem.row_strides, problem.mode
    outputs = {"out": poisoned(strides.y, mode.dtype_out)}
    if mode.fadd.stores:
        outputs["residual_out"] = poisoned(strides.residual_out, mode.operand_dtype)
    return outputs


# y is below 2, so with this global scale e4m3 holds every scale of y.
_GLOBAL_SCALE = 1024.0

# A gradient has the stride of its output, and a gate the stride of x.
_STRIDE_OF = {"dy": "y", "dresidual_out": "residual_out", "gate": "x"}


def _drawer(problem: Problem, device: torch.device, seed: int) -> Callable[[Parameter], torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(parameter: Parameter) -> torch.Tensor:
        name, n = parameter.name, problem.n
        is_smooth = name == "smooth_scale"
        bound = 1.0 if is_smooth else 0.5
        dtype = problem.mode.dtype_in if name == "x" else problem.mode.operand_dtype
        if name == "dy" and problem.dy_format.is_fp8:
            dtype = problem.dy_format.dtype
        if is_smooth:
            dtype = problem.prec_sm
        if parameter.kind is Kind.RANDOM:
            return torch.randint(2**63 - 1, (2,), device=device, generator=generator)
        if parameter.kind is Kind.VALUE:
            scales = {"scale_ub": problem.scale_ub, "global_scale": _GLOBAL_SCALE}
            return torch.full((1,), scales.get(name, 1 / problem.mode.dtype_out.qmax), device=device)
        if name == "column_scale":
            # None that divides by nothing; a little of y is cut off.
            values = torch.empty(n, device=device).uniform_(bound, 2 * bound, generator=generator)
            return (values / problem.mode.dtype_out.qmax).to(TORCH_DTYPES[dtype])
        if parameter.kind.is_scale:
            # One a row or a group, and none so small that rows vanish beside eps.
            leading = (problem.tokens, problem.heads) if problem.heads > 1 else (problem.m,)
            shape = (*leading, problem.dy_format.columns(n)) if parameter.kind is Kind.SCALES else leading
            return torch.empty(shape, device=device).uniform_(bound, 2 * bound, generator=generator)
        is_rows = parameter.kind is Kind.ROWS
        if parameter.kind is Kind.SAMPLES:
            values = torch.empty((problem.samples, n), device=device).uniform_(-bound, bound, generator=generator)
            return values.to(TORCH_DTYPES[dtype])
        stride = getattr(problem.row_strides, _STRIDE_OF.get(name, name)) if is_rows else n
        shape = (problem.tokens, stride) if is_rows else (n,)
        values = torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator).to(TORCH_DTYPES[dtype])
        if parameter.kind is Kind.GROUPS and problem.group:
            return values.view(-1, problem.group)
        return problem.rows_in(values) if is_rows else values

    return draw

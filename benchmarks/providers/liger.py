"""Liger's Triton kernels, called as its autograd functions call them."""

from __future__ import annotations

import torch

from ..cells import Norm, Task
from ..inputs import Inputs
from ..provider import Prepared, Provider, load, named

_LAYER, _RMS, _ADD_RMS = (f"liger_kernel.ops.{name}" for name in ("layer_norm", "rms_norm", "fused_add_rms_norm"))
_OFFSET, _CASTING = 0.0, "llama"


def _layer_forward(inputs: Inputs) -> Prepared:
    run = load(_LAYER).layer_norm_forward
    return Prepared(lambda: run(inputs.x, inputs.weight, inputs.bias, inputs.eps), named("y"))


def _layer_backward(inputs: Inputs) -> Prepared:
    run = load(_LAYER).layer_norm_backward
    arguments = (inputs.dy, inputs.x, inputs.weight, inputs.bias, inputs.mean, inputs.rstd)
    return Prepared(lambda: run(*arguments), named("dx", "dweight", "dbias"))


def _rms_forward(inputs: Inputs) -> Prepared:
    run = load(_RMS).rms_norm_forward
    return Prepared(lambda: run(inputs.x, inputs.weight, inputs.eps, _OFFSET, _CASTING, None), named("y"))


def _rms_backward(inputs: Inputs) -> Prepared:
    module = load(_RMS)
    block, warps = module.calculate_settings(inputs.cell.n)
    casting = module._str_to_casting_mode[_CASTING]
    assert inputs.dy is not None
    # Writing dx over dy is its default, and saves it a pass over memory; only the first call sees the drawn dy.
    dy = inputs.dy.clone()
    arguments = (dy, inputs.x, inputs.weight, inputs.rstd, _OFFSET, casting, block, warps, True, None)
    return Prepared(lambda: module.rms_norm_backward(*arguments), named("dx", "dweight"))


def _rms_add(inputs: Inputs) -> Prepared:
    run = load(_ADD_RMS).fused_add_rms_norm_forward
    arguments = (inputs.x, inputs.residual, inputs.weight, inputs.eps, _OFFSET, _CASTING)
    return Prepared(lambda: run(*arguments), named("y", "residual_out"))


def _layer_grad_forward(inputs: Inputs) -> Prepared:
    run, leaves = load(_LAYER).LigerLayerNormFunction.apply, inputs.leaves()
    return Prepared(lambda: run(*leaves, inputs.eps), named("y"))


def _layer_grad_both(inputs: Inputs) -> Prepared:
    run, leaves = load(_LAYER).LigerLayerNormFunction.apply, inputs.leaves()
    return Prepared(
        lambda: torch.autograd.grad(run(*leaves, inputs.eps), leaves, inputs.dy), named("dx", "dweight", "dbias")
    )


def _rms_grad_forward(inputs: Inputs) -> Prepared:
    run, leaves = load(_RMS).LigerRMSNormFunction.apply, inputs.leaves()
    return Prepared(lambda: run(*leaves, inputs.eps, _OFFSET, _CASTING, False), named("y"))


def _rms_grad_both(inputs: Inputs) -> Prepared:
    run, leaves = load(_RMS).LigerRMSNormFunction.apply, inputs.leaves()
    return Prepared(
        lambda: torch.autograd.grad(run(*leaves, inputs.eps, _OFFSET, _CASTING, False), leaves, inputs.dy),
        named("dx", "dweight"),
    )


PROVIDERS = (
    Provider(
        "liger",
        "Liger",
        (_LAYER, _RMS, _ADD_RMS),
        {
            (Task.FORWARD, Norm.LAYER): _layer_forward,
            (Task.FORWARD, Norm.RMS): _rms_forward,
            (Task.ADD, Norm.RMS): _rms_add,
            (Task.BACKWARD, Norm.LAYER): _layer_backward,
            (Task.BACKWARD, Norm.RMS): _rms_backward,
            (Task.GRAD_FORWARD, Norm.LAYER): _layer_grad_forward,
            (Task.GRAD_FORWARD, Norm.RMS): _rms_grad_forward,
            (Task.GRAD_BOTH, Norm.LAYER): _layer_grad_both,
            (Task.GRAD_BOTH, Norm.RMS): _rms_grad_both,
        },
        distribution="liger-kernel",
    ),
)

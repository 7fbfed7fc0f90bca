"""QuACK's CuTe DSL kernels. Its LayerNorm takes fp32 weight and bias only, and gets them so."""

from __future__ import annotations

import torch

from ..cells import Norm, Task
from ..inputs import Inputs
from ..provider import Prepared, Provider, load, named

_MODULE = "quack.rmsnorm"


def _layer_forward(inputs: Inputs) -> Prepared:
    assert inputs.bias is not None
    run, weight, bias = load(_MODULE).layernorm_fwd, inputs.weight.float(), inputs.bias.float()
    return Prepared(lambda: run(inputs.x, weight, bias, inputs.eps), named("y"))


def _layer_backward(inputs: Inputs) -> Prepared:
    run = load(_MODULE).layernorm_bwd
    arguments = (inputs.x, inputs.weight, inputs.dy, inputs.rstd, inputs.mean)
    return Prepared(lambda: run(*arguments), named("dx", "dweight", "dbias"))


def _rms_forward(inputs: Inputs) -> Prepared:
    run = load(_MODULE).rmsnorm_fwd
    return Prepared(lambda: run(inputs.x, inputs.weight, eps=inputs.eps), named("y"))


def _rms_add(inputs: Inputs) -> Prepared:
    run = load(_MODULE).rmsnorm_fwd
    return Prepared(
        lambda: run(inputs.x, inputs.weight, residual=inputs.residual, eps=inputs.eps), named("y", "residual_out")
    )


def _rms_backward(inputs: Inputs) -> Prepared:
    run = load(_MODULE).rmsnorm_bwd
    return Prepared(lambda: run(inputs.x, inputs.weight, inputs.dy, inputs.rstd), named("dx", "dweight"))


def _rms_grad_forward(inputs: Inputs) -> Prepared:
    run, (x, weight) = load(_MODULE).rmsnorm, inputs.leaves()
    return Prepared(lambda: run(x, weight, eps=inputs.eps), named("y"))


def _rms_grad_both(inputs: Inputs) -> Prepared:
    run, (x, weight) = load(_MODULE).rmsnorm, inputs.leaves()
    return Prepared(
        lambda: torch.autograd.grad(run(x, weight, eps=inputs.eps), (x, weight), inputs.dy), named("dx", "dweight")
    )


PROVIDERS = (
    Provider(
        "quack",
        "QuACK",
        (_MODULE,),
        {
            (Task.FORWARD, Norm.LAYER): _layer_forward,
            (Task.FORWARD, Norm.RMS): _rms_forward,
            (Task.ADD, Norm.RMS): _rms_add,
            (Task.BACKWARD, Norm.LAYER): _layer_backward,
            (Task.BACKWARD, Norm.RMS): _rms_backward,
            (Task.GRAD_FORWARD, Norm.RMS): _rms_grad_forward,
            (Task.GRAD_BOTH, Norm.RMS): _rms_grad_both,
        },
        distribution="quack-kernels",
    ),
)

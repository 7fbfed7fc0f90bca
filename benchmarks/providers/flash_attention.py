"""flash-attention's Triton kernel, through its differentiable functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from ..cells import Norm, Task
from ..inputs import DROPOUT_P, Inputs
from ..provider import Builder, Prepared, Provider, load, named

_MODULE = "flash_attn.ops.triton.layer_norm"


def _norm(inputs: Inputs, tensors: tuple[torch.Tensor | None, ...], **options: Any) -> Callable[[], Any]:
    x, weight, bias = (*tensors, None)[:3]
    rms = inputs.cell.norm is Norm.RMS
    return partial(load(_MODULE).layer_norm_fn, x, weight, bias, eps=inputs.eps, is_rms_norm=rms, **options)


def _forward(inputs: Inputs) -> Prepared:
    return Prepared(_norm(inputs, (inputs.x, inputs.weight, inputs.bias)), named("y"))


def _add(inputs: Inputs) -> Prepared:
    tensors = (inputs.x, inputs.weight, inputs.bias)
    return Prepared(_norm(inputs, tensors, residual=inputs.residual, prenorm=True), named("y", "residual_out"))


def _drop_add(inputs: Inputs) -> Prepared:
    tensors = (inputs.x, inputs.weight, inputs.bias)
    options = {"residual": inputs.residual, "prenorm": True, "dropout_p": DROPOUT_P}
    return Prepared(_norm(inputs, tensors, **options), named("y", "residual_out"))


def _drop_add_cuda(inputs: Inputs) -> Prepared:
    name = {Norm.LAYER: "layer", Norm.RMS: "rms"}[inputs.cell.norm]
    run = getattr(load(f"flash_attn.ops.{name}_norm"), f"dropout_add_{name}_norm")
    arguments = (inputs.x, inputs.residual, inputs.weight, inputs.bias, DROPOUT_P, inputs.eps)
    return Prepared(lambda: run(*arguments, prenorm=True), named("y", "residual_out"))


def _grad_forward(inputs: Inputs) -> Prepared:
    return Prepared(_norm(inputs, inputs.leaves()), named("y"))


def _backward(inputs: Inputs) -> Prepared:
    leaves = inputs.leaves()
    y = _norm(inputs, leaves)()
    return Prepared(
        lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True), named("dx", "dweight", "dbias")
    )


def _grad_both(inputs: Inputs) -> Prepared:
    leaves = inputs.leaves()
    run = _norm(inputs, leaves)
    return Prepared(lambda: torch.autograd.grad(run(), leaves, inputs.dy), named("dx", "dweight", "dbias"))


_BUILDERS: dict[Task, Builder] = {
    Task.FORWARD: _forward,
    Task.ADD: _add,
    Task.DROP_ADD: _drop_add,
    Task.BACKWARD: _backward,
    Task.GRAD_FORWARD: _grad_forward,
    Task.GRAD_BOTH: _grad_both,
}

PROVIDERS = (
    Provider(
        "flash-attn",
        "flash-attention",
        (_MODULE,),
        {(task, norm): builder for (task, builder), norm in product(_BUILDERS.items(), Norm)},
        distribution="flash-attn",
    ),
    # An extension of its own, which is built beside the package.
    Provider(
        "flash-attn-cuda",
        "flash-attention's dropout_layer_norm",
        ("dropout_layer_norm", "flash_attn.ops.layer_norm"),
        {(Task.DROP_ADD, norm): _drop_add_cuda for norm in Norm},
        distribution="flash-attn",
    ),
)

"""Apex's CUDA kernels: FastLayerNorm, for the row lengths it was built for, and the fused modules for any."""

from __future__ import annotations

from typing import Any

import torch

from ..cells import Norm, Task
from ..groups import apexs
from ..inputs import Inputs
from ..provider import Builder, Prepared, Provider, load, named

_FAST, _FUSED, _GROUP = "apex.contrib.layer_norm", "apex.normalization", "apex.contrib.group_norm"


def _module(inputs: Inputs, module: str, name: str) -> Any:
    norm: Any = getattr(load(module), name)(inputs.cell.n, eps=inputs.eps).to(inputs.x.device, inputs.x.dtype)
    with torch.no_grad():
        norm.weight.copy_(inputs.weight)
        if inputs.bias is not None:
            norm.bias.copy_(inputs.bias)
    return norm


def _builders(module: str, name: str, norm: Norm) -> dict[tuple[Task, Norm], Builder]:
    def forward(inputs: Inputs) -> Prepared:
        run = _module(inputs, module, name).requires_grad_(False)
        return Prepared(lambda: run(inputs.x), named("y"))

    def grad_forward(inputs: Inputs) -> Prepared:
        run, x = _module(inputs, module, name), inputs.leaves()[0]
        return Prepared(lambda: run(x), named("y"))

    def backward(inputs: Inputs) -> Prepared:
        run, x = _module(inputs, module, name), inputs.leaves()[0]
        y, leaves = run(x), (x, *run.parameters())
        return Prepared(
            lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True), named("dx", "dweight", "dbias")
        )

    def both(inputs: Inputs) -> Prepared:
        run, x = _module(inputs, module, name), inputs.leaves()[0]
        leaves = (x, *run.parameters())
        return Prepared(lambda: torch.autograd.grad(run(x), leaves, inputs.dy), named("dx", "dweight", "dbias"))

    builders: dict[Task, Builder] = {
        Task.FORWARD: forward,
        Task.GRAD_FORWARD: grad_forward,
        Task.BACKWARD: backward,
        Task.GRAD_BOTH: both,
    }
    return {(task, norm): builder for task, builder in builders.items()}


PROVIDERS = (
    Provider(
        "apex-fast",
        "apex FastLayerNorm",
        (_FAST, "fast_layer_norm"),
        _builders(_FAST, "FastLayerNorm", Norm.LAYER),
        distribution="apex",
        compiles=False,
    ),
    Provider(
        "apex-fused",
        "apex fused",
        (_FUSED, "fused_layer_norm_cuda"),
        _builders(_FUSED, "FusedLayerNorm", Norm.LAYER) | _builders(_FUSED, "FusedRMSNorm", Norm.RMS),
        distribution="apex",
        compiles=False,
    ),
    Provider(
        "apex-group",
        "apex GroupNorm",
        (_GROUP,),
        apexs(_GROUP),
        distribution="apex",
        compiles=False,
        groups=("forward, channels last", "backward, channels last"),
    ),
)

"""Peers whose functions take a cell's tensors as they are: Liger, QuACK, flash-attention, apex and others.

Each has a function that binds a call to tensors, and a row of `PROVIDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..cells import Cell, GatedCell, GroupCell, Norm, Task
from ..inputs import DROPOUT_P, Inputs
from ..provider import DIFFERENTIABLE, RECORDED, Bind, Prepared, Provider, calls, load, named

Tensors = Mapping[str, torch.Tensor]
Bound = Callable[[], Any]

_GATED, _GROUP = (Task.GATED, Task.GATED_BACKWARD), (Task.GROUP, Task.GROUP_BACKWARD)

# Apex's CUDA kernels: FastLayerNorm, for the row lengths it was built for, the fused modules for any, and GroupNorm of
# channels that are innermost.
_FAST, _FUSED, _APEX_GROUP = "apex.contrib.layer_norm", "apex.normalization", "apex.contrib.group_norm"


def _apex(module: str, name: str) -> Bind:
    def bind(inputs: Inputs, tensors: Tensors) -> Bound:
        cell, make = inputs.cell, getattr(load(module), name)
        if isinstance(cell, GroupCell):
            norm = make(cell.groups, cell.shape[1], eps=inputs.eps, act="silu" if cell.silu else "")
        else:
            norm = make(cell.n, eps=inputs.eps)
        norm = norm.to(inputs.x.device, inputs.x.dtype)
        for own in tensors.keys() - {"x"}:
            # A leaf in place of the parameter.
            delattr(norm, own)
            setattr(norm, own, tensors[own])
        return partial(norm, tensors["x"])

    return bind


# flash-attention's Triton kernel, through its differentiable functions.
_FLASH = "flash_attn.ops.triton.layer_norm"


def _flash(inputs: Inputs, tensors: Tensors) -> Bound:
    options: dict[str, Any] = {"eps": inputs.eps, "is_rms_norm": inputs.cell.norm is Norm.RMS}
    if inputs.cell.task.adds:
        options |= {"residual": inputs.residual, "prenorm": True}
    if inputs.cell.task is Task.DROP_ADD:
        options["dropout_p"] = DROPOUT_P
    x, weight, bias = tensors["x"], tensors["weight"], tensors.get("bias")
    return partial(load(_FLASH).layer_norm_fn, x, weight, bias, **options)


def _flash_cuda(inputs: Inputs, tensors: Tensors) -> Bound:
    name = {Norm.LAYER: "layer", Norm.RMS: "rms"}[inputs.cell.norm]
    run = getattr(load(f"flash_attn.ops.{name}_norm"), f"dropout_add_{name}_norm")
    vectors = (tensors["weight"], tensors.get("bias"))
    return partial(run, tensors["x"], inputs.residual, *vectors, DROPOUT_P, inputs.eps, prenorm=True)


# Liger's Triton kernels, called as its autograd functions call them.
_LIGER_LAYER, _LIGER_RMS, _LIGER_ADD = (
    f"liger_kernel.ops.{name}" for name in ("layer_norm", "rms_norm", "fused_add_rms_norm")
)
_LIGER_OPTIONS, _LIGER_ORDER = (0.0, "llama"), ("dy", "x", "weight", "bias", "mean", "rstd")


def _liger_layer(inputs: Inputs, tensors: Tensors) -> Bound:
    module = load(_LIGER_LAYER)
    recorded = inputs.cell.task in RECORDED
    run = module.LigerLayerNormFunction.apply if recorded else module.layer_norm_forward
    return partial(run, *tensors.values(), inputs.eps)


def _liger_rms(inputs: Inputs, tensors: Tensors) -> Bound:
    module, operands = load(_LIGER_RMS), (*tensors.values(), inputs.eps, *_LIGER_OPTIONS)
    if inputs.cell.task in RECORDED:
        return partial(module.LigerRMSNormFunction.apply, *operands, False)
    return partial(module.rms_norm_forward, *operands, None)


def _liger_add(inputs: Inputs, tensors: Tensors) -> Bound:
    run = load(_LIGER_ADD).fused_add_rms_norm_forward
    return partial(run, tensors["x"], inputs.residual, tensors["weight"], inputs.eps, *_LIGER_OPTIONS)


def _liger_rms_backward(inputs: Inputs) -> Prepared:
    module = load(_LIGER_RMS)
    block, warps = module.calculate_settings(inputs.cell.n)
    offset, casting = _LIGER_OPTIONS
    assert inputs.dy is not None
    # Writing dx over dy is its default, and saves it a pass over memory; only the first call sees the drawn dy.
    dy = inputs.dy.clone()
    options = (offset, module._str_to_casting_mode[casting], block, warps, True, None)
    return Prepared(
        lambda: module.rms_norm_backward(dy, inputs.x, inputs.weight, inputs.rstd, *options), named("dx", "dweight")
    )


# QuACK's CuTe DSL kernels. Its LayerNorm takes fp32 weight and bias only, and gets them so.
_QUACK, _QUACK_ORDER = "quack.rmsnorm", ("x", "weight", "dy", "rstd")


def _quack_layer(inputs: Inputs, tensors: Tensors) -> Bound:
    weight, bias = tensors["weight"].float(), tensors["bias"].float()
    return partial(load(_QUACK).layernorm_fwd, tensors["x"], weight, bias, inputs.eps)


def _quack_rms(inputs: Inputs, tensors: Tensors) -> Bound:
    recorded = inputs.cell.task in RECORDED
    residual = {"residual": inputs.residual} if inputs.cell.task.adds else {}
    run = load(_QUACK).rmsnorm if recorded else load(_QUACK).rmsnorm_fwd
    return partial(run, *tensors.values(), eps=inputs.eps, **residual)


# Gated norms, Triton kernels: flash-linear-attention's with the gate behind the norm and whole rows, mamba_ssm's in
# either order, of groups of columns too.
_FLA, _MAMBA = "fla.modules.fused_norm_gate", "mamba_ssm.ops.triton.layernorm_gated"


def _fla(inputs: Inputs, tensors: Tensors) -> Bound:
    run = getattr(load(_FLA), "rms_norm_gated" if inputs.cell.norm is Norm.RMS else "layer_norm_gated")
    operands = (*tensors.values(), None)[:4]
    return partial(run, *operands, eps=inputs.eps)


def _mamba(inputs: Inputs, tensors: Tensors) -> Bound:
    cell = inputs.cell
    assert isinstance(cell, GatedCell)
    run = getattr(load(_MAMBA), "rmsnorm_fn" if cell.norm is Norm.RMS else "layernorm_fn")
    options = {"eps": inputs.eps, "group_size": cell.columns or None, "norm_before_gate": not cell.gate_first}
    return partial(run, tensors["x"], tensors["weight"], tensors.get("bias"), z=tensors["gate"], **options)


# SGLang's Triton kernels of GroupNorm, of its pictures and videos: with SiLU, or with channels innermost.
_SGLANG = "sglang.kernels.ops.diffusion.norm"
_CONTIGUOUS, _CHANNELS_LAST = f"{_SGLANG}.group_norm_silu_triton", f"{_SGLANG}.group_norm_silu_twopass_triton"
# Channels innermost, of pictures alone and of so many channels at most, a power of two.
_MOST_CHANNELS, _PICTURE_DIMENSIONS = 2048, 4


def _sglang(inputs: Inputs, tensors: Tensors) -> Bound:
    cell = inputs.cell
    assert isinstance(cell, GroupCell)
    arguments = (*tensors.values(), cell.groups, inputs.eps)
    if cell.channels_last:
        run = partial(load(_CHANNELS_LAST).group_norm_silu_4d, *arguments, cell.silu)
    else:
        run = partial(load(_CONTIGUOUS).triton_group_norm_silu, *arguments)
    # It takes no input of which a gradient could be asked for.
    return torch.no_grad()(run)


def _sglang_offers(cell: Cell) -> bool:
    if not isinstance(cell, GroupCell) or not cell.channels_last:
        return isinstance(cell, GroupCell) and cell.silu
    channels = cell.shape[1]
    return len(cell.shape) == _PICTURE_DIMENSIONS and channels <= _MOST_CHANNELS and not channels & (channels - 1)


# The kernels of Triton's tutorial 05, where this project began, through the function that the tutorial defines.
_TUTORIAL = "benchmarks.tutorial05"


def _tutorial(inputs: Inputs, tensors: Tensors) -> Bound:
    x, weight, bias = tensors.values()
    return partial(load(_TUTORIAL).layer_norm, x, (inputs.cell.n,), weight, bias, inputs.eps)


_LAYER, _RMS = (Norm.LAYER,), (Norm.RMS,)


def _backward(path: str, function: str, *names: str) -> Callable[[Inputs], Prepared]:
    """Return how a function computes gradients, given the inputs that it takes."""
    results = named("dx", *[f"d{name}" for name in ("weight", "bias") if name == "weight" or "mean" in names])
    return lambda inputs: Prepared(
        partial(getattr(load(path), function), *[getattr(inputs, name) for name in names]), results
    )


PROVIDERS = (
    Provider(
        "apex-fast",
        "apex FastLayerNorm",
        (_FAST, "fast_layer_norm"),
        calls(_apex(_FAST, "FastLayerNorm"), DIFFERENTIABLE, _LAYER),
        distribution="apex",
        compiles=False,
    ),
    Provider(
        "apex-fused",
        "apex fused",
        (_FUSED, "fused_layer_norm_cuda"),
        calls(_apex(_FUSED, "FusedLayerNorm"), DIFFERENTIABLE, _LAYER)
        | calls(_apex(_FUSED, "FusedRMSNorm"), DIFFERENTIABLE, _RMS),
        distribution="apex",
        compiles=False,
    ),
    Provider(
        "apex-group",
        "apex GroupNorm",
        (_APEX_GROUP,),
        calls(_apex(_APEX_GROUP, "GroupNorm"), _GROUP, _LAYER),
        distribution="apex",
        compiles=False,
        groups=("forward, channels last", "backward, channels last"),
    ),
    Provider(
        "fla",
        "flash-linear-attention",
        (_FLA,),
        calls(_fla, _GATED),
        distribution="flash-linear-attention",
        groups=("forward", "backward", "forward, projected", "backward, projected"),
    ),
    Provider(
        "flash-attn",
        "flash-attention",
        (_FLASH,),
        calls(_flash, (*DIFFERENTIABLE, Task.ADD, Task.DROP_ADD)),
        distribution="flash-attn",
    ),
    # An extension of its own, which is built beside the package.
    Provider(
        "flash-attn-cuda",
        "flash-attention's dropout_layer_norm",
        ("dropout_layer_norm", "flash_attn.ops.layer_norm"),
        calls(_flash_cuda, (Task.DROP_ADD,)),
        distribution="flash-attn",
    ),
    Provider(
        "liger",
        "Liger",
        (_LIGER_LAYER, _LIGER_RMS, _LIGER_ADD),
        calls(_liger_layer, (Task.FORWARD, *RECORDED), _LAYER)
        | calls(_liger_rms, (Task.FORWARD, *RECORDED), _RMS)
        | calls(_liger_add, (Task.ADD,), _RMS)
        | {
            (Task.BACKWARD, Norm.LAYER): _backward(_LIGER_LAYER, "layer_norm_backward", *_LIGER_ORDER),
            (Task.BACKWARD, Norm.RMS): _liger_rms_backward,
        },
        distribution="liger-kernel",
    ),
    Provider("mamba-ssm", "mamba_ssm", (_MAMBA,), calls(_mamba, _GATED), distribution="mamba-ssm"),
    Provider(
        "quack",
        "QuACK",
        (_QUACK,),
        calls(_quack_layer, (Task.FORWARD,), _LAYER)
        | calls(_quack_rms, (Task.FORWARD, Task.ADD, *RECORDED), _RMS)
        | {
            (Task.BACKWARD, Norm.LAYER): _backward(_QUACK, "layernorm_bwd", *_QUACK_ORDER, "mean"),
            (Task.BACKWARD, Norm.RMS): _backward(_QUACK, "rmsnorm_bwd", *_QUACK_ORDER),
        },
        distribution="quack-kernels",
    ),
    Provider(
        "sglang",
        "SGLang",
        (_CONTIGUOUS, _CHANNELS_LAST),
        calls(_sglang, (Task.GROUP,), _LAYER),
        distribution="sglang",
        offers=_sglang_offers,
    ),
    Provider(
        "tutorial05",
        "Triton's tutorial",
        (_TUTORIAL,),
        calls(_tutorial, DIFFERENTIABLE, _LAYER),
        # Its partial sums are of x's type, and each row adds a rounding: of 4096 rows, about two tolerances.
        allowances={"dweight": 4.0, "dbias": 4.0},
    ),
)

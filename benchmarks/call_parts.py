"""Eager calls of normforge and of torch as functions to time, and the parts of three of normforge's, each by itself.

A part is what a call that is known from before comes to, done again with the same operands. Keys, guards, allocations
and launches are those of a real call; what reads addresses is the code of `normforge.calls.lookup`, in short. Two
calls are also taken apart in place: see `in_place`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import normforge
from normforge.calls.outputs import LayerNormOutput, NormGradients
from normforge.families import plain_functions

from .in_place import LAUNCH, quantised_in_place, recorded_in_place
from .inputs import Inputs
from .take_apart import Taken, take_apart, without
from .timing import Call

# The groups, and the whole call that each group's parts are compared with.
WHOLE, BESIDE = "whole calls", "whole calls, of the tree beside"
QUANTISED, RECORDED, BACKWARD = "add + smooth int8", "recorded", "backward"
QUANTISED_IN_PLACE, RECORDED_IN_PLACE = f"{QUANTISED}, in place", f"{RECORDED}, in place"
WHOLE_OF = {
    QUANTISED: "layernorm2d_fwd, residual added, smooth int8",
    QUANTISED_IN_PLACE: "layernorm2d_fwd, residual added, smooth int8",
    RECORDED: "layer_norm, recorded",
    RECORDED_IN_PLACE: "layer_norm, recorded",
    BACKWARD: "layer_norm, backward alone",
}

_GIVEN = "passing the arguments on"
_KEY = "key and look-up"
_LIKE = "what tensors are like"
_ADDRESSES = "shape and addresses"
_OUTPUTS = "allocations and their addresses"
_CHOICE = "kernel, grid and the tuple returned"
_APPLY = "torch's apply of an empty function"

_made: Callable[..., Any] = tuple.__new__


class Part(NamedTuple):
    """One function to time.

    Attributes:
        group: what it is a part of, or `WHOLE`.
        name: what it does.
        call: the function.
        less: the part of the same group whose time it holds besides its own.
    """

    group: str
    name: str
    call: Call
    less: str | None = None


def make_parts(inputs: Inputs, interpreted: bool, beside: ModuleType | None = None) -> list[Part]:
    """Everything to time; no launches where kernels are interpreted.

    Args:
        inputs: x (M, N), with weight, bias, residual and smooth_scale.
        interpreted: whether launches are Triton's interpreter's.
        beside: another revision of normforge, whose whole calls are timed besides.

    Raises:
        UsageError: normforge's calls do not come to what is taken apart here.
    """
    calls = _torch_calls(inputs) | _whole_calls(inputs, normforge)
    quantised, recorded, backward = (
        take_apart(calls[WHOLE_OF[group]], inputs.cell.m, interpreted) for group in (QUANTISED, RECORDED, BACKWARD)
    )
    x, weight, bias, _, _ = _operands(inputs)
    leaves, shape, given = inputs.leaves(), (inputs.cell.n,), _quantised_arguments(inputs)
    quantised_with = quantised_in_place(quantised, lambda function: lambda: function(x, weight, bias, **given))
    recorded_with = recorded_in_place(
        recorded, lambda function: lambda: function(leaves[0], shape, leaves[1], leaves[2], inputs.eps)
    )
    for group, shorter in ((QUANTISED_IN_PLACE, quantised_with), (RECORDED_IN_PLACE, recorded_with)):
        if not interpreted:
            shorter[LAUNCH] = calls[WHOLE_OF[group]]
    return [
        *(Part(WHOLE, name, call) for name, call in calls.items()),
        *(Part(BESIDE, name, call) for name, call in (_whole_calls(inputs, beside) if beside else {}).items()),
        *_quantised_parts(inputs, quantised),
        *_differences(QUANTISED_IN_PLACE, quantised_with),
        *_recorded_parts(inputs, recorded),
        *_differences(RECORDED_IN_PLACE, recorded_with),
        *_backward_parts(inputs, backward),
    ]


def _differences(group: str, calls: dict[str, Call]) -> list[Part]:
    """Return calls that each do one thing more than the call before."""
    return [Part(group, name, call, less) for (name, call), less in zip(calls.items(), (None, *calls), strict=False)]


def _torch_calls(inputs: Inputs) -> dict[str, Call]:
    x, weight, bias, _, _ = _operands(inputs)
    return {
        "F.layer_norm": lambda: F.layer_norm(x, (inputs.cell.n,), weight, bias, inputs.eps),
        **_recordable(inputs, "F.layer_norm", F.layer_norm),
    }


def _whole_calls(inputs: Inputs, library: Any) -> dict[str, Call]:
    x, weight, bias, residual, _ = _operands(inputs)
    forward, eps, quantised = library.layernorm2d_fwd, inputs.eps, _quantised_arguments(inputs)
    return {
        "layernorm2d_fwd": lambda: forward(x, weight, bias, eps=eps),
        "layernorm2d_fwd, residual added": lambda: forward(
            x, weight, bias, eps=eps, residual=residual, fadd="pre_add_store"
        ),
        WHOLE_OF[QUANTISED]: lambda: forward(x, weight, bias, **quantised),
        **_recordable(inputs, "layer_norm", library.layer_norm),
        **_family_calls(inputs, library),
    }


def _family_calls(inputs: Inputs, library: Any) -> dict[str, Call]:
    """Make a call of each other family, without a gradient, and recorded where the family has gradients."""
    x, weight, bias, residual, _ = _operands(inputs)
    # Four samples of M / 4 rows where they divide, and eight groups of channels.
    samples = math.gcd(4, len(x))
    rows, images = x.view(samples, -1, inputs.cell.n), x.view(len(x), 16, -1)
    scale, shift = weight.expand(samples, -1).contiguous(), bias.expand(samples, -1).contiguous()
    families: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "add_layer_norm": (library.add_layer_norm, (x, residual, weight, bias)),
        "add_layer_norm, dropout": (
            partial(library.add_layer_norm, dropout_p=0.1, dropout_rng=(1, 2)),
            (x, residual, weight, bias),
        ),
        "modulated_layer_norm": (library.modulated_layer_norm, (rows, scale, shift)),
        "gated_rms_norm": (library.gated_rms_norm, (x, residual, weight)),
        "group_norm": (
            lambda x, *vectors: library.group_norm(x, 8, *vectors),
            (images, *(vector[:16].contiguous() for vector in (weight, bias))),
        ),
    }
    calls: dict[str, Call] = {"quantised_rms_norm": lambda: library.quantised_rms_norm(x, weight)}
    for name, (function, operands) in families.items():
        calls[name] = partial(function, *operands)
        calls |= _recorded(name, function, operands)
    return calls


def _recordable(inputs: Inputs, name: str, function: Callable[..., torch.Tensor]) -> dict[str, Call]:
    def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return function(x, (inputs.cell.n,), weight, bias, inputs.eps)

    return _recorded(name, normalise, inputs.operands())


def _recorded(name: str, function: Callable[..., Any], operands: Sequence[torch.Tensor]) -> dict[str, Call]:
    """Make a call that autograd records, its backward pass, and both together."""
    leaves = [operand.detach().requires_grad_() for operand in operands]

    def run() -> torch.Tensor:
        made = function(*leaves)
        y: torch.Tensor = made[0] if isinstance(made, tuple) else made
        return y

    y = run()
    dy = torch.randn_like(y)
    return {
        f"{name}, recorded": run,
        f"{name}, forward and backward": lambda: torch.autograd.grad(run(), leaves, dy),
        f"{name}, backward alone": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
    }


def _quantised_parts(inputs: Inputs, taken: Taken) -> list[Part]:
    x, weight, bias, residual, smooth_scale = _operands(inputs)
    outputs = (x, residual, weight, None, None)
    parts = {
        _LIKE: taken.compare(x, weight, bias, residual, smooth_scale, None, None, None),
        _ADDRESSES: lambda: (
            *(x.shape[-1], residual.shape == x.shape, x.data_ptr(), weight.data_ptr(), bias.data_ptr()),
            *(residual.data_ptr(), smooth_scale.data_ptr()),
        ),
        _KEY: taken.look_up(),
        _OUTPUTS: taken.allocate(),
        _CHOICE: lambda: (taken.choose(), _made(LayerNormOutput, outputs)),
    }
    return [*(Part(QUANTISED, name, call) for name, call in parts.items()), *_launches(QUANTISED, taken)]


def _recorded_parts(inputs: Inputs, taken: Taken) -> list[Part]:
    _, weight, bias, residual, _ = _operands(inputs)
    x, *vectors = leaves = inputs.leaves()
    eps, shape = inputs.eps, (inputs.cell.n,)
    kept = (residual.clone(), weight, bias)
    calls = SimpleNamespace(recorded=SimpleNamespace(normalise=lambda *_: residual))
    public = without(plain_functions.layer_norm, native=SimpleNamespace(calls=calls))
    parts = [
        Part(RECORDED, _GIVEN, lambda: public(x, shape, *vectors, eps)),
        Part(RECORDED, _APPLY, lambda: _apply_empty(kept, *leaves)),
        Part(RECORDED, "saving three tensors", lambda: _apply_saving(kept, *leaves), less=_APPLY),
        Part(RECORDED, _LIKE, taken.compare(x, *vectors, None, None, None)),
        Part(RECORDED, _ADDRESSES, lambda: (x.shape[-1], *[tensor.data_ptr() for tensor in leaves])),
        Part(RECORDED, _KEY, taken.look_up()),
        Part(RECORDED, _OUTPUTS, taken.allocate()),
        Part(RECORDED, _CHOICE, lambda: (taken.choose(), (residual, weight))),
    ]
    return parts + _launches(RECORDED, taken)


def _backward_parts(inputs: Inputs, taken: Taken) -> list[Part]:
    x, weight, bias, dy, _ = _operands(inputs)
    leaves = inputs.leaves()
    # A mean and rstd a row, in one tensor.
    statistics = torch.empty(2 * inputs.cell.m, device=x.device)
    y = _apply_empty((dy.clone(), weight, bias), *leaves)
    gradients = (dy, weight, bias, None)
    parts = {
        "torch's engine, with an empty function": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
        _LIKE: taken.compare(dy, *leaves[:2], None, statistics, None, None),
        _ADDRESSES: lambda: (
            *(x.shape[-1], dy.shape == x.shape, dy.data_ptr(), x.data_ptr(), weight.data_ptr()),
            statistics.data_ptr(),
        ),
        _KEY: taken.look_up(),
        _OUTPUTS: taken.allocate(),
        _CHOICE: lambda: (taken.choose(), _made(NormGradients, gradients)),
    }
    return [*(Part(BACKWARD, name, call) for name, call in parts.items()), *_launches(BACKWARD, taken)]


def _launches(group: str, taken: Taken) -> list[Part]:
    count = len(taken.launches)
    return [Part(group, "launch" if count == 1 else f"{count} launches", taken.launch())] if count else []


class _Empty(torch.autograd.Function):
    """y and the gradients of weight and bias are what a pass is called with; dy serves as the gradient of x."""

    @staticmethod
    def forward(ctx: Any, told: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.told = told
        return told[0]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, dy, *ctx.told[1:]


class _Saving(_Empty):
    """An identity that keeps as many tensors as a norm does."""

    @staticmethod
    def forward(ctx: Any, told: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.told = told
        ctx.save_for_backward(*tensors)
        return told[0]


# Without what makes ready for functorch's transforms, as `normforge.families.plain` calls its own.
_apply_empty: Callable[..., Any] = super(torch.autograd.Function, _Empty).apply
_apply_saving: Callable[..., Any] = super(torch.autograd.Function, _Saving).apply


def _operands(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.x, inputs.weight, inputs.bias, inputs.residual, inputs.smooth_scale


def _quantised_arguments(inputs: Inputs) -> dict[str, Any]:
    return {
        "eps": inputs.eps,
        "residual": inputs.residual,
        "fadd": "pre_add_store",
        "smooth_scale": inputs.smooth_scale,
        "fquant": "smooth_dynamic",
        "out_dtype": inputs.out_dtype,
    }

"""The tasks in plain torch, for the providers that run them eagerly or compile them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from .cells import Norm, Task
from .inputs import DROPOUT_P, Inputs
from .oracle import QMAX
from .provider import Builder, Prepared, named

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm; without a bias RMSNorm."""
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual and normalise the rounded sum, as a model written in torch does."""
    residual_out = x + residual
    return normalise(residual_out, weight, bias, eps), residual_out


def drop_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop elements of x, add the residual and normalise the rounded sum."""
    return add(F.dropout(x, DROPOUT_P), residual, weight, bias, eps)


def quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    smooth_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32 and quantise each row by its largest value."""
    y = normalise(x.float(), weight.float(), None if bias is None else bias.float(), eps)
    z = y if smooth_scale is None else y * smooth_scale
    qmax = QMAX[out_dtype]
    y_scale = z.abs().amax(-1, keepdim=True) / qmax
    ratio = (z / y_scale).clamp(-qmax, qmax)
    return (ratio if out_dtype.is_floating_point else ratio.round()).to(out_dtype), y_scale


def add_quantise(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    smooth_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the residual, and quantise the norm of the rounded sum."""
    residual_out = x + residual
    y, y_scale = quantise(residual_out, weight, bias, eps, smooth_scale, out_dtype)
    return y, y_scale, residual_out


def torch_builders(transform: Transform) -> dict[tuple[Task, Norm], Builder]:
    """Builders of every task that run `transform` of the functions above.

    Of the backward pass only autograd's engine is timed, on a graph that was recorded before and is kept: what an
    optimiser step pays, and the same for both norms and for compiled and eager graphs.
    """

    def forward(inputs: Inputs) -> Prepared:
        run, arguments = transform(normalise), (inputs.x, inputs.weight, inputs.bias, inputs.eps)
        return Prepared(lambda: run(*arguments), named("y"))

    def added(inputs: Inputs) -> Prepared:
        run, arguments = transform(add), (inputs.x, inputs.residual, inputs.weight, inputs.bias, inputs.eps)
        return Prepared(lambda: run(*arguments), named("y", "residual_out"))

    def dropped(inputs: Inputs) -> Prepared:
        run, arguments = transform(drop_add), (inputs.x, inputs.residual, inputs.weight, inputs.bias, inputs.eps)
        return Prepared(lambda: run(*arguments), named("y", "residual_out"))

    def quantised(inputs: Inputs) -> Prepared:
        run, arguments = transform(quantise), (inputs.x, *_quantisation(inputs))
        return Prepared(lambda: run(*arguments), named("y", "y_scale"))

    def added_and_quantised(inputs: Inputs) -> Prepared:
        run, arguments = transform(add_quantise), (inputs.x, inputs.residual, *_quantisation(inputs))
        return Prepared(lambda: run(*arguments), named("y", "y_scale", "residual_out"))

    def recorded(inputs: Inputs) -> Prepared:
        run, leaves = transform(normalise), inputs.leaves()
        return Prepared(lambda: run(*_padded(leaves), inputs.eps), named("y"))

    def backward(inputs: Inputs) -> Prepared:
        run, leaves = transform(normalise), inputs.leaves()
        y = run(*_padded(leaves), inputs.eps)
        return Prepared(
            lambda: torch.autograd.grad(y, leaves, inputs.dy, retain_graph=True), named("dx", "dweight", "dbias")
        )

    def both(inputs: Inputs) -> Prepared:
        run, leaves = transform(normalise), inputs.leaves()
        return Prepared(
            lambda: torch.autograd.grad(run(*_padded(leaves), inputs.eps), leaves, inputs.dy),
            named("dx", "dweight", "dbias"),
        )

    builders: dict[Task, Builder] = {
        Task.FORWARD: forward,
        Task.ADD: added,
        Task.DROP_ADD: dropped,
        Task.QUANT: quantised,
        Task.ADD_QUANT: added_and_quantised,
        Task.GRAD_FORWARD: recorded,
        Task.BACKWARD: backward,
        Task.GRAD_BOTH: both,
    }
    made = {(task, norm): builder for (task, builder), norm in product(builders.items(), Norm)}
    return made | module_builders({Norm.LAYER: torch.nn.LayerNorm, Norm.RMS: torch.nn.RMSNorm}, transform)


def module_builders(
    kinds: Mapping[Norm, Callable[..., torch.nn.Module]], transform: Transform | None = None
) -> dict[tuple[Task, Norm], Builder]:
    """Builders of calls of modules, `transform`ed, given classes whose constructors are torch's."""

    def build(inputs: Inputs) -> Prepared:
        x = inputs.x
        module = kinds[inputs.cell.norm](inputs.cell.n, eps=inputs.eps, device=x.device, dtype=x.dtype)
        state = {"weight": inputs.weight} | ({} if inputs.bias is None else {"bias": inputs.bias})
        module.load_state_dict(state)
        run = module if transform is None else transform(module)

        # Entering it is a part of every provider's time, under a microsecond.
        def call() -> Any:
            with torch.no_grad():
                return run(x)

        return Prepared(call, named("y"))

    return {(Task.MODULE, norm): build for norm in kinds}


def _quantisation(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.weight, inputs.bias, inputs.eps, inputs.smooth_scale, inputs.out_dtype


def _padded(leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    return leaves if len(leaves) == 3 else (*leaves, None)

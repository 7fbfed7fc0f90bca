"""The generated kernels as differentiable functions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .arguments import prepare
from .backward import layernorm2d_bwd, rmsnorm2d_bwd
from .codegen.model import Norm
from .errors import GradientError
from .launch import run
from .output import LayerNormOutput
from .rows import as_rows, walkable

# What torch.nn.functional.rms_norm adds where eps is None: it computes 16-bit inputs in fp32, as the kernels do.
DEFAULT_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class _Call:
    """What a forward pass is told besides its tensors."""

    norm: Norm
    eps: float
    out_dtype: torch.dtype


def normalise(
    norm: Norm,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the kernel that serves arguments which `rows.check` has passed, recording it where a gradient is due.

    Args:
        norm: which norm.
        x: (..., *shape), fp16, bf16 or fp32.
        shape: the dimensions that are normalised together.
        weight: shape, or None.
        bias: shape, or None; None for RMSNorm.
        residual: x's shape, or None for no fused add.
        eps: None is `DEFAULT_EPS`.
        out_dtype: y's; None is x's, or fp32 where autocast makes it so.

    Returns:
        y, and residual_out where there is a residual; both of x's shape.
    """
    inputs = (
        as_rows(x, len(shape)),
        None if weight is None else weight.flatten().contiguous(),
        None if bias is None else bias.flatten().contiguous(),
        None if residual is None else as_rows(residual, len(shape)),
    )
    call = _Call(norm, DEFAULT_EPS if eps is None else eps, out_dtype or _result_dtype(norm, x))
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        # torch declares no types for Function.apply.
        y, residual_out = _Normalise.apply(call, *inputs)  # type: ignore[no-untyped-call]
    else:
        y, residual_out, *_ = _launch(call, *inputs, save_mv=False)
    return _unflattened(y, shape), None if residual_out is None else _unflattened(residual_out, shape)


def _unflattened(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return rows if len(shape) == 1 else rows.view(*rows.shape[:-1], *shape)


def _result_dtype(norm: Norm, x: torch.Tensor) -> torch.dtype:
    # Where torch's operator would be given x in fp32, the kernel reads it as it is and returns the same numbers.
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") and _autocasts(norm) else x.dtype


@cache
def _autocasts(norm: Norm) -> bool:
    """Whether autocast runs torch's operator in fp32 on a GPU; none does on a CPU."""
    # Asked of torch, because releases differ: 2.11 does so with layer_norm alone, 2.13 with rms_norm too.
    operator = {Norm.LAYER: "aten::layer_norm", Norm.RMS: "aten::rms_norm"}[norm]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCUDA"))


def _launch(
    call: _Call,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    save_mv: bool,
) -> LayerNormOutput:
    return run(
        prepare(
            call.norm,
            x,
            weight,
            bias,
            eps=call.eps,
            residual=residual,
            fadd="none" if residual is None else "pre_add_store",
            out_dtype=call.out_dtype,
            save_mv=save_mv,
        )
    )


@dataclass(frozen=True)
class _Task:
    """What a backward pass is told besides its tensors."""

    dx_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    wants: tuple[str, ...]


class _Normalise(torch.autograd.Function):
    """y and residual_out of x, weight, bias and residual; see `normalise`.

    Kept for the backward pass: what was normalised (x, or residual_out, which the caller holds anyway), weight, and a
    mean and rstd a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = _launch(call, x, weight, bias, residual, save_mv=True)
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if residual is None else output.residual_out, weight, output.mean, output.rstd)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, bias, residual)]
        return output.y, output.residual_out

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dresidual_out: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        _, for_x, for_weight, for_bias, for_residual = ctx.needs_input_grad
        x_dtype, bias_dtype, residual_dtype = ctx.dtypes
        dx, dweight, dbias = dresidual_out, None, None
        if dy is not None:
            # One rounding each, also where x and residual differ: the wider of the two types holds what both round.
            dtypes = [dtype for dtype, due in ((x_dtype, for_x), (residual_dtype, for_residual)) if due]
            due = {"dx": for_x or for_residual, "dweight": for_weight, "dbias": for_bias}
            task = _Task(
                dx_dtype=torch.promote_types(dtypes[0], dtypes[-1]) if dtypes else x_dtype,
                bias_dtype=bias_dtype,
                wants=tuple(name for name, is_due in due.items() if is_due),
            )
            compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
            dx, dweight, dbias = compute(task, dy, dresidual_out, *ctx.saved_tensors)
        return (
            None,
            dx.to(x_dtype) if for_x and dx is not None else None,
            dweight,
            dbias,
            dx.to(residual_dtype) if for_residual and dx is not None else None,
        )


class _Gradients(torch.autograd.Function):
    """The backward pass as a function of its own, so that differentiating it is an error rather than a zero."""

    @staticmethod
    def forward(ctx: Any, task: _Task, *tensors: Any) -> tuple[torch.Tensor | None, ...]:
        return _gradients(task, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise GradientError(
            "a gradient of normforge's gradient was asked (a double backward) and no kernel computes it; "
            "use torch.nn.functional's norm there, or normforge.unpatch(model)"
        )


def _gradients(
    task: _Task,
    dy: torch.Tensor,
    dresidual_out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """dx, dweight and dbias of rows, those that are due."""
    arguments: dict[str, Any] = {
        "rstd": rstd,
        "dresidual_out": None if dresidual_out is None else walkable(dresidual_out),
        "dx_dtype": task.dx_dtype,
        "wants": task.wants,
    }
    if mean is None:
        found = rmsnorm2d_bwd(walkable(dy), x, weight, **arguments)
    else:
        found = layernorm2d_bwd(walkable(dy), x, weight, mean=mean, bias_dtype=task.bias_dtype, **arguments)
    return found.dx, found.dweight, found.dbias

"""Calls that a graph is traced of: they become operators, with what is checked before them and what is copied.

TorchDynamo, which torch.compile reads programs with, follows this code, and `is_dynamo_compiling` is True to it alone.
make_fx, torch.export and fake tensors see operators instead, as modes and subclasses of torch's dispatcher do. Either
question is one C call or less for an eager call, 0.05 us.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..codegen.model import FusedAdd, FusedQuant, Norm, Rounding
from ..dtypes import TORCH_DTYPES
from ..kernels.backends import dispatch_modes, intercepted, jit_tracing
from ..operators import registered
from ..upstream.torch_dynamo import eager_only
from . import gradient_arguments
from .arguments import refuse_gradient
from .forward import forward_fused, forward_plain
from .gradients import backward
from .outputs import LayerNormOutput, NormGradients
from .recorded import autocasts, normalise, normalise_known
from .rows import as_rows

__all__ = [
    "backward_traced",
    "dispatch_modes",
    "forward_traced",
    "intercepted",
    "is_dynamo_compiling",
    "keeps_for_recomputation",
    "normalise_traced",
    "result_dtype",
    "unrecorded",
]


def unrecorded() -> AbstractContextManager[object]:
    """A context in which torch.jit.trace records nothing, and sizes are integers rather than tensors."""
    return _paused() if jit_tracing() else nullcontext()


@contextmanager
def _paused() -> Iterator[None]:
    # torch's stubs lack the second of the two.
    inner: Any = torch._C
    state = inner._get_tracing_state()
    inner._set_tracing_state(None)
    try:
        yield
    finally:
        inner._set_tracing_state(state)


def forward_traced(
    norm: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    residual: torch.Tensor | None,
    fadd: str | int | FusedAdd,
    smooth_scale: torch.Tensor | None,
    fquant: str | int | FusedQuant,
    x_bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    scale_dtype: torch.dtype,
    save_mv: bool,
    rounding: str | Rounding,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> LayerNormOutput:
    """What `forward_fused` is, as one operator; see `layernorm2d_fwd`. Overlap of outputs is not looked for."""
    call = registered.checked(
        norm,
        x,
        weight,
        bias,
        eps,
        weight_offset,
        residual,
        fadd,
        smooth_scale,
        fquant,
        x_bias,
        out_dtype,
        scale_dtype,
        save_mv,
        rounding,
        out,
        residual_out,
    )
    refuse_gradient(call)
    mode = call.mode
    saves_mean = mode.save_mv and norm == "layer"
    parameters = (bias, call.eps) if norm == "layer" else (call.eps, call.weight_offset)
    given = (
        *(x, weight, *parameters, residual, mode.fadd.value, smooth_scale, mode.fquant.value, x_bias),
        *(out_dtype, scale_dtype, mode.save_mv, mode.rounding.value),
    )
    if out is None and residual_out is None:
        made = iter(registered.FORWARD[norm](*given))
        return LayerNormOutput(
            y=next(made),
            residual_out=next(made) if mode.fadd.stores else None,
            y_scale=next(made) if mode.fquant.quantises else None,
            mean=next(made) if saves_mean else None,
            rstd=next(made) if mode.save_mv else None,
        )
    y = x.new_empty(x.shape, dtype=TORCH_DTYPES[mode.dtype_out]) if out is None else out
    if residual_out is None and mode.fadd.stores and residual is not None:
        residual_out = residual.new_empty(x.shape)
    y_scale, mean, rstd = registered.FORWARD_INTO[norm](*given, y, residual_out)
    return LayerNormOutput(
        y=y,
        residual_out=residual_out,
        y_scale=y_scale if mode.fquant.quantises else None,
        mean=mean if saves_mean else None,
        rstd=rstd if mode.save_mv else None,
    )


def backward_traced(
    norm: str,
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    packed: bool,
    weight_offset: float,
    x_bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    dx_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    wants: Collection[str],
) -> NormGradients:
    """What `gradients.backward` is, as one operator; see `layernorm2d_bwd`."""
    call = gradient_arguments.check(
        Norm(norm), dy, x, weight, mean, rstd, packed, weight_offset, x_bias, dresidual_out, dx_dtype, bias_dtype, wants
    )
    gradient_arguments.refuse_gradient(call)
    statistics = (mean, rstd) if norm == "layer" else (rstd, weight_offset)
    types = (dx_dtype, bias_dtype) if norm == "layer" else (dx_dtype,)
    given = (dy, x, weight, *statistics, x_bias, dresidual_out, *types, list(wants))
    made = iter(registered.BACKWARD[norm](*given))
    return NormGradients(*[next(made) if name in wants else None for name in NormGradients._fields])


def normalise_traced(
    norm: Norm,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `autograd.normalise` is, as one operator and the views and copies before it."""
    rows = as_rows(x, len(shape))
    weight = None if weight is None else weight.flatten().contiguous()
    bias = None if bias is None else bias.flatten().contiguous()
    residual = None if residual is None else as_rows(residual, len(shape))
    given = (rows, weight, bias, eps) if norm.centres else (rows, weight, eps, 0.0)
    recorded = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (rows, weight, bias, residual)
    )
    fadd = "none" if residual is None else "pre_add_store"
    out_dtype = out_dtype or result_dtype(norm.value, x)
    y, *others = registered.FORWARD[norm.value](
        *given, residual, fadd, None, "none", None, out_dtype, torch.float32, recorded, "nearest"
    )
    return y.view(x.shape), None if residual is None else others[0].view(x.shape)


def result_dtype(norm: str, x: torch.Tensor) -> torch.dtype | None:
    """fp32 where autocast would give torch's operator x in it; None, x's own, anywhere else."""
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") and _autocasts(norm) else None


def keeps_for_recomputation() -> bool:
    """Whether what a call keeps is compared with what it keeps when it is made again, as checkpoint does.

    Any hook on saved tensors may be checkpoint's. `autograd.normalise` keeps the same tensors whoever sees operators.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _autocasts(norm: str) -> bool:
    if is_dynamo_compiling():
        from ..upstream import trace_constants

        return trace_constants.autocasts(norm)
    return autocasts(norm)


eager_only(forward_plain, forward_fused, backward, normalise_known, normalise, *registered.ADAPTERS)

"""Calls that a graph is traced of: they become operators, with what is checked before them and what is copied.

TorchDynamo, which torch.compile reads programs with, follows this code, and `is_dynamo_compiling` is True to it alone.
make_fx, torch.export and fake tensors see operators instead, as modes and subclasses of torch's dispatcher do. Either
question is one C call or less for an eager call, 0.05 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..codegen.model import Cast, Norm
from ..dtypes import TORCH_DTYPES
from ..mode_words import word
from ..upstream.torch_dynamo import constant_in_traces
from ..upstream.torch_internals import dispatch_modes, jit_tracing
from . import gradient_arguments
from .arguments import prepare, refuse_gradient
from .backend import intercepted
from .outputs import LayerNormOutput, NormGradients
from .rows import as_rows

__all__ = [
    "backward_traced",
    "dispatch_modes",
    "forward_traced",
    "intercepted",
    "is_dynamo_compiling",
    "keeps_for_recomputation",
    "normalise_traced",
    "operator",
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


_NAMES = {"layer": "layernorm2d", "rms": "rmsnorm2d"}


def operator(norm: str, does: str) -> Any:
    """A norm's operator, which `operators` registers: "fwd", "fwd_into", which writes where it is told, or "bwd"."""
    return getattr(torch.ops.normforge, f"{_NAMES[norm]}_{does}").default


def forward_traced(norm: str, given: Mapping[str, Any]) -> LayerNormOutput:
    """A forward call as one operator; overlap of outputs is not looked for.

    Args:
        norm: the norm's word.
        given: the arguments of its forward function, by name.
    """
    call = prepare(Norm(norm), **given, addressed=False)
    refuse_gradient(call)
    mode, x, residual = call.mode, call.x, call.residual
    saves_mean = mode.save_mv and norm == "layer"
    said = dict(given)
    # In the order of the operator's schema, and as it has them.
    said |= {"eps": call.eps, "fadd": mode.fadd.value, "fquant": mode.fquant.value}
    said |= {"save_mv": mode.save_mv, "rounding": mode.rounding.value, "cast": mode.cast.value}
    if "weight_offset" in given:
        said["weight_offset"] = call.weight_offset
    out, residual_out = said.pop("out"), said.pop("residual_out")
    if out is None and residual_out is None:
        made = iter(operator(norm, "fwd")(*said.values()))
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
    y_scale, mean, rstd = operator(norm, "fwd_into")(*said.values(), y, residual_out)
    return LayerNormOutput(
        y=y,
        residual_out=residual_out,
        y_scale=y_scale if mode.fquant.quantises else None,
        mean=mean if saves_mean else None,
        rstd=rstd if mode.save_mv else None,
    )


def backward_traced(norm: str, given: Mapping[str, Any]) -> NormGradients:
    """A backward call as one operator, likewise."""
    defaults = {"mean": None, "weight_offset": 0.0, "bias_dtype": None}
    call = gradient_arguments.check(Norm(norm), **{**defaults, **given}, packed=False)
    gradient_arguments.refuse_gradient(call)
    made = iter(operator(norm, "bwd")(*{**given, "cast": call.cast.value, "wants": list(call.wants)}.values()))
    return NormGradients(*[next(made) if name in call.wants else None for name in NormGradients._fields])


def normalise_traced(
    norm: Norm,
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    cast: str | Cast = "after_weight",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `recorded.normalise` is, as one operator and the views and copies before it."""
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
    y, *others = operator(norm.value, "fwd")(
        *given,
        residual,
        fadd,
        None,
        "none",
        None,
        out_dtype,
        torch.float32,
        recorded,
        "nearest",
        word(Cast, "cast", cast).value,
    )
    return y.view(x.shape), None if residual is None else others[0].view(x.shape)


def result_dtype(norm: str, x: torch.Tensor) -> torch.dtype | None:
    """fp32 where autocast would give torch's operator x in it; None, x's own, anywhere else.

    The kernel reads x as it is, and returns the same numbers.
    """
    return torch.float32 if torch.is_autocast_enabled("cuda") and x.is_cuda and _autocasts(norm) else None


@constant_in_traces
def _autocasts(norm: str) -> bool:
    """Whether autocast runs torch's operator in fp32 on a GPU; none does on a CPU."""
    return _registered_for_autocast(f"aten::{norm}_norm")


@cache
def _registered_for_autocast(name: str) -> bool:
    # Asked of torch, because releases differ: 2.11 does so with layer_norm alone, 2.13 with rms_norm too.
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"))


def keeps_for_recomputation() -> bool:
    """Whether what a call keeps is compared with what it keeps when it is made again, as checkpoint does.

    Any hook on saved tensors may be checkpoint's. `recorded.normalise` keeps the same tensors whoever sees operators.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None

"""The forward and backward functions as operators of torch's dispatcher: what a traced graph holds of them.

torch.compile, torch.export and make_fx record operators, and learn what they return from fake kernels. Eager calls do
not come here: the dispatcher alone takes 6 us. An operator returns the outputs that were asked for, in the order of
`LayerNormOutput` or `NormGradients`, and nothing in place of the others. Its schema has no defaults, so that its
kernels are given every argument.

Where a caller says where outputs go, another operator (`..._into`) writes y and the sum there. A copy after the
functional one would move as many bytes again as its kernel does. It returns y_scale, mean and rstd, of no elements
where not asked for: of operators that write, torch functionalises only those that return a fixed number of tensors.

Importing this module registers them, in `torch.ops.normforge`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..calls.arguments import Call, prepare, refuse_gradient
from ..calls.first import launched, launched_backward, refuse_foreign
from ..calls.gradient_arguments import check
from ..calls.outputs import LayerNormOutput, NormGradients, results_of
from ..calls.straight import layernorm2d_bwd, layernorm2d_fwd, rmsnorm2d_bwd, rmsnorm2d_fwd
from ..codegen import parameters
from ..codegen.model import Norm
from ..codegen.parameters import Family
from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_internals import dispatch_modes
from . import gradients

_MODES = (
    "Tensor? residual, str fadd, Tensor? smooth_scale, str fquant, Tensor? x_bias, ScalarType? out_dtype, "
    "ScalarType scale_dtype, bool save_mv, str rounding, str cast"
)
_WRITTEN = "Tensor(a!) out, Tensor(b!)? residual_out"
_FORWARD = {
    Norm.LAYER: "Tensor x, Tensor? weight, Tensor? bias, float eps",
    Norm.RMS: "Tensor x, Tensor? weight, float eps, float weight_offset",
}
_BACKWARD = {
    Norm.LAYER: (
        "Tensor? dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
        "Tensor? x_bias, Tensor? dresidual_out, str cast, ScalarType? dx_dtype, ScalarType? bias_dtype, str[] wants"
    ),
    Norm.RMS: (
        "Tensor? dy, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, "
        "Tensor? x_bias, Tensor? dresidual_out, str cast, ScalarType? dx_dtype, str[] wants"
    ),
}

# The compiler keeps strides as they were traced: fake kernels refuse rows that kernels cannot walk, and no others come.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_STRAIGHT: dict[str, Callable[..., LayerNormOutput]] = {"layer": layernorm2d_fwd, "rms": rmsnorm2d_fwd}
_STRAIGHT_BACK: dict[str, Callable[..., NormGradients]] = {"layer": layernorm2d_bwd, "rms": rmsnorm2d_bwd}

_NAMESPACE = "normforge"
_library = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch declares no types for it


PerRow = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _present(tensors: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


@eager_only
def _layer_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *modes: Any,
    run: Callable[..., Any],
) -> Any:
    return run("layer", x, weight, bias, eps, 0.0, *modes)


@eager_only
def _rms_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    *modes: Any,
    run: Callable[..., Any],
) -> Any:
    return run("rms", x, weight, None, eps, weight_offset, *modes)


def _named(family: Family, norm: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What a norm's function is given, from arguments for all parameters of its family, or all but the last."""
    rows = zip(family.parameters, arguments, strict=False)
    return {row.name: argument for row, argument in rows if Norm(norm) in row.default}


def _given(family: Family, norm: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    given = _named(family, norm, arguments)
    refuse_foreign(family, given)
    return given


def _run_forward(norm: str, arguments: tuple[Any, ...]) -> LayerNormOutput:
    given = _given(parameters.FORWARD, norm, arguments)
    # Whoever sees operators has seen this one.
    return launched(norm, None, given) if dispatch_modes() else _STRAIGHT[norm](**given)


def _forward(norm: str, *arguments: Any) -> list[torch.Tensor]:
    return _present(_run_forward(norm, arguments))


def _forward_into(norm: str, *arguments: Any) -> PerRow:
    return _per_row(_run_forward(norm, arguments))


def _checked(norm: str, arguments: tuple[Any, ...]) -> Call:
    return prepare(Norm(norm), **_named(parameters.FORWARD, norm, arguments), addressed=False)


def _fake_forward(norm: str, *arguments: Any) -> list[torch.Tensor]:
    return _present(_outputs_like(_checked(norm, arguments)))


def _fake_forward_into(norm: str, *arguments: Any) -> PerRow:
    call = _checked(norm, arguments)
    refuse_gradient(call)
    return _per_row(_outputs_like(call))


def _per_row(output: LayerNormOutput) -> PerRow:
    """y_scale, mean and rstd, for an operator that has to return some tensor for each."""
    y_scale, mean, rstd = (output.y.new_empty(0) if tensor is None else tensor for tensor in output[2:])
    return y_scale, mean, rstd


def _outputs_like(call: Call) -> LayerNormOutput:
    """Tensors without data, of the shapes, strides and types that a call returns."""
    y, *others = results_of(call, call.x.new_empty)
    assert y is not None
    return LayerNormOutput(y, *others)


def _layer_backward(
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x_bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    cast: str,
    dx_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    wants: list[str],
    *,
    run: Callable[..., list[torch.Tensor]],
) -> list[torch.Tensor]:
    return run("layer", dy, x, weight, mean, rstd, 0.0, x_bias, dresidual_out, cast, dx_dtype, bias_dtype, wants)


@eager_only
def _rms_backward(
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    x_bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    cast: str,
    dx_dtype: torch.dtype | None,
    wants: list[str],
    *,
    run: Callable[..., list[torch.Tensor]],
) -> list[torch.Tensor]:
    return run("rms", dy, x, weight, None, rstd, weight_offset, x_bias, dresidual_out, cast, dx_dtype, None, wants)


def _backward(norm: str, *arguments: Any) -> list[torch.Tensor]:
    given = _given(parameters.BACKWARD, norm, arguments)
    run = partial(launched_backward, norm, None, given) if dispatch_modes() else partial(_STRAIGHT_BACK[norm], **given)
    return _present(run())


def _fake_backward(norm: str, *arguments: Any) -> list[torch.Tensor]:
    names = (row.name for row in parameters.BACKWARD.parameters)
    call = check(Norm(norm), **dict(zip(names, arguments, strict=True)), packed=False)
    return _present(results_of(call, call.x.new_empty))


def _register(
    name: str,
    parameters: str,
    returns: str,
    adapt: Callable[..., Any],
    run: Callable[..., Any],
    fake: Callable[..., Any],
) -> torch._ops.OpOverload[Any, Any]:
    """Define an operator, with one kernel for all devices and a fake one, to which `adapt` hands what it is given."""
    _library.define(f"{name}({parameters}) -> {returns}", tags=_TAGS)  # type: ignore[no-untyped-call]
    _library.impl(  # type: ignore[no-untyped-call]
        name, partial(adapt, run=run), "CompositeExplicitAutograd"
    )
    torch.library.register_fake(f"{_NAMESPACE}::{name}", partial(adapt, run=fake), lib=_library)
    operator: torch._ops.OpOverload[Any, Any] = getattr(torch.ops.normforge, name).default
    return operator


def _count_writes(name: str, operator: torch._ops.OpOverload[Any, Any]) -> None:
    """Have autograd see what an operator of `_WRITTEN` outputs writes to, also where it is traced and does not run."""

    def count(keyset: torch._C.DispatchKeySet, *arguments: Any) -> Any:
        out, residual_out = arguments[-2:]
        increment_version(out if residual_out is None else (out, residual_out))
        return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments)

    # As torch.library.custom_op does for what it is told is mutated.
    _library.impl(name, count, "ADInplaceOrView", with_keyset=True)  # type: ignore[no-untyped-call]


_NAMES = {Norm.LAYER: "layernorm2d", Norm.RMS: "rmsnorm2d"}
_ADAPT_FORWARD: dict[Norm, Callable[..., Any]] = {Norm.LAYER: _layer_forward, Norm.RMS: _rms_forward}
_ADAPT_BACKWARD: dict[Norm, Callable[..., Any]] = {Norm.LAYER: _layer_backward, Norm.RMS: _rms_backward}

# By the norm's word.
FORWARD = {
    norm.value: _register(
        f"{name}_fwd", f"{_FORWARD[norm]}, {_MODES}", "Tensor[]", _ADAPT_FORWARD[norm], _forward, _fake_forward
    )
    for norm, name in _NAMES.items()
}
FORWARD_INTO = {
    norm.value: _register(
        f"{name}_fwd_into",
        f"{_FORWARD[norm]}, {_MODES}, {_WRITTEN}",
        "(Tensor y_scale, Tensor mean, Tensor rstd)",
        _ADAPT_FORWARD[norm],
        _forward_into,
        _fake_forward_into,
    )
    for norm, name in _NAMES.items()
}
for _norm, _name in _NAMES.items():
    _count_writes(f"{_name}_fwd_into", FORWARD_INTO[_norm.value])
BACKWARD = {
    norm.value: _register(f"{name}_bwd", _BACKWARD[norm], "Tensor[]", _ADAPT_BACKWARD[norm], _backward, _fake_backward)
    for norm, name in _NAMES.items()
}
for _norm, _name in _NAMES.items():
    gradients.register(
        _library,
        _norm,
        f"{_NAMESPACE}::{_name}_fwd",
        f"{_NAMESPACE}::{_name}_bwd",
        BACKWARD[_norm.value],
    )

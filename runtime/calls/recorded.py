"""The generated kernels as differentiable functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, product
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..codegen.model import Cast, Norm
from ..codegen.parameters import BACKWARD, FORWARD
from ..mode_words import word
from ..upstream.torch_dynamo import eager_only
from ..upstream.torch_internals import dispatch_modes
from . import torch_instead
from .argument_checks import LARGEST_FP32
from .backend import intercepted
from .double_backward import refuse_double_backward
from .first import launched, launched_backward, resolved
from .known import PLAIN, Found, Key
from .launch import run, run_recorded
from .outputs import LayerNormOutput, dtype_of_all, packed_of, unpacked
from .row_layout import as_rows, walkable
from .straight import find_gradients, find_recorded
from .traced import operated, result_dtype

# What a forward pass is told besides its tensors: the norm's word, eps, y's dtype (None for x's), the cast, what
# `launch` is to be given if the call is known, and what it is to be known by if it is not.
_Told = tuple[str, float, "torch.dtype | None", str | Cast, "Found | None", "Key | None"]


@eager_only
def normalise_known(
    norm: str,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float | None,
    out_dtype: torch.dtype | None = None,
    cast: str | Cast = "after_weight",
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """What `normalise` returns of arguments like those of a call before; None where there was none.

    Arguments need no check before: a call that `normalise` would copy or refuse something of is like none.
    """
    # The class of each, because 64.0 is equal to 64, and a dictionary has a length too. A proxy of torch.fx records
    # whatever it is asked.
    if eps.__class__ is not float or normalized_shape.__class__ not in _SHAPES or x.__class__ not in PLAIN:
        return None
    if len(normalized_shape) != 1:
        return None
    _, records, found = find_recorded(norm, x, weight, bias, residual, out_dtype, cast)
    n = normalized_shape[0]
    if found is None or n.__class__ is not int or n != found[0].n or not 0.0 <= eps <= LARGEST_FP32:
        return None
    if not records:
        return run(*found, eps, 0.0, None, None)[:2]
    told = (norm, eps, None, cast, found, None)
    if residual is None:
        return _apply(told, x, weight, bias), None
    both: tuple[torch.Tensor, torch.Tensor] = _apply_add(told, x, weight, bias, residual)
    return both


_SHAPES = frozenset((tuple, torch.Size, list))


@eager_only
def normalise(
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
    """Run the kernel that serves arguments which `check_normalised` has passed, recording it where a gradient is due.

    Args:
        norm: which norm.
        x: (..., *shape), fp16, bf16 or fp32.
        shape: the dimensions that are normalised together.
        weight: shape, or None.
        bias: shape, or None; None for RMSNorm.
        residual: x's shape, or None for no fused add.
        eps: added to the variance, or the mean square.
        out_dtype: y's; None is x's, or fp32 where autocast makes it so.
        cast: as in `layernorm2d_fwd`.

    Returns:
        y, and residual_out where there is a residual; both of x's shape.
    """
    # Resolved here, where autograd sees it, and not by what launches.
    x, weight, bias, residual = resolved(x), resolved(weight), resolved(bias), resolved(residual)
    rows = (
        as_rows(x, len(shape)),
        None if weight is None else weight.flatten().contiguous(),
        None if bias is None else bias.flatten().contiguous(),
        None if residual is None else as_rows(residual, len(shape)),
    )
    key = None
    # Known is only what was launched as it was passed.
    if all(row is given for row, given in zip(rows, (x, weight, bias, residual), strict=True)):
        key, _, _ = find_recorded(norm.value, *rows, out_dtype, cast)
    told = (norm.value, eps, out_dtype or result_dtype(norm.value, x), cast, None, key)
    total: torch.Tensor | None = None
    if not (torch.is_grad_enabled() and _any_requires_gradient(*rows)):
        y, total = _launch(told, False, *rows)[:2]
    elif residual is None:
        y = _Normalise.apply(told, *rows[:3])  # type: ignore[no-untyped-call]  # torch declares no types for it
    else:
        y, total = _AddNormalise.apply(told, *rows)  # type: ignore[no-untyped-call]  # likewise
    return _unflattened(y, shape), None if total is None else _unflattened(total, shape)


def _any_requires_gradient(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> bool:
    return (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )


def _launch(
    told: _Told,
    save_mv: bool,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> LayerNormOutput:
    norm, eps, _, _, found, key = told
    if found is not None:
        return run_recorded(*found, eps, 0.0)
    if intercepted(x, weight, bias, residual):
        return _launch_operator(told, save_mv, x, weight, bias, residual)
    return launched(norm, key, _given(told, save_mv, x, weight, bias, residual), packed=save_mv)


def _given(
    told: _Told,
    save_mv: bool,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> dict[str, Any]:
    """The arguments of the forward function; the others have their defaults."""
    _, eps, out_dtype, cast, _, _ = told
    given: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "eps": eps, "cast": word(Cast, "cast", cast).value}
    given |= {"out_dtype": out_dtype, "save_mv": save_mv}
    if residual is not None:
        given |= {"residual": residual, "fadd": "pre_add_store"}
    return given


def _launch_operator(
    told: _Told,
    save_mv: bool,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> LayerNormOutput:
    y, *others = operated(FORWARD.functions[Norm(told[0])], _given(told, save_mv, x, weight, bias, residual))
    total = None if residual is None else others.pop(0)
    return LayerNormOutput(y, total, None, None, packed_of(*others) if save_mv else None)


def _unflattened(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return rows if len(shape) == 1 else rows.view(*rows.shape[:-1], *shape)


class _Normalise(torch.autograd.Function):
    """y of x, weight and bias; see `normalise`.

    Kept for the backward pass: x, weight, and a mean and rstd a row.
    """

    @staticmethod
    def forward(
        ctx: Any, told: _Told, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y, _, _, _, statistics = _launch(told, True, x, weight, bias, None)
        ctx.told = (told[0], None if bias is None else bias.dtype, told[3])
        ctx.save_for_backward(x, weight, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        norm, bias_dtype, cast = ctx.told
        told = (norm, cast, None, bias_dtype, _WANTS[ctx.needs_input_grad[1:]])
        # Recorded only where a gradient of the gradient could be asked for.
        compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
        return None, *compute(told, dy, None, *ctx.saved_tensors)


class _AddNormalise(torch.autograd.Function):
    """y and residual_out of x, weight, bias and residual; see `normalise`.

    Kept for the backward pass: residual_out, which the caller holds anyway, weight, and a mean and rstd a row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        told: _Told,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, total, _, _, statistics = _launch(told, True, x, weight, bias, residual)
        # Of fp32 alone nothing was rounded first, whatever the sum is stored in.
        cast = "after_weight" if x.dtype is y.dtype is torch.float32 else told[3]
        ctx.told = (told[0], x.dtype, None if bias is None else bias.dtype, residual.dtype, cast)
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        if not (x.requires_grad or residual.requires_grad):
            ctx.mark_non_differentiable(total)
        ctx.save_for_backward(total, weight, statistics)
        return y, total

    @staticmethod
    def backward(
        ctx: Any, dy: torch.Tensor | None, dresidual_out: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        _, for_x, for_weight, for_bias, for_residual = ctx.needs_input_grad
        norm, x_dtype, bias_dtype, residual_dtype, cast = ctx.told
        dx, dweight, dbias = dresidual_out, None, None
        if dy is not None:
            dx_dtype = x_dtype
            if residual_dtype is not x_dtype:
                dtypes = [dtype for dtype, due in ((x_dtype, for_x), (residual_dtype, for_residual)) if due]
                dx_dtype = dtype_of_all(dtypes) if dtypes else None
            told = (norm, cast, dx_dtype, bias_dtype, _WANTS[for_x or for_residual, for_weight, for_bias])
            compute = _Gradients.apply if torch.is_grad_enabled() else _gradients
            dx, dweight, dbias = compute(told, dy, dresidual_out, *ctx.saved_tensors)
        return (
            None,
            _rounded(dx, x_dtype) if for_x else None,
            dweight,
            dbias,
            _rounded(dx, residual_dtype) if for_residual else None,
        )


# Their `apply` without what makes ready for functorch's transforms, which is 2.5 us of Python.
_apply = super(torch.autograd.Function, _Normalise).apply
_apply_add = super(torch.autograd.Function, _AddNormalise).apply

# Which gradients are due, from whether those of x (or residual), weight and bias are.
_WANTS: dict[tuple[bool, ...], tuple[str, ...]] = {
    due: tuple(compress(("dx", "dweight", "dbias"), due)) for due in product((False, True), repeat=3)
}


def _rounded(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


class _Gradients(torch.autograd.Function):
    """The backward pass as a function of its own, so that differentiating it is an error rather than a zero."""

    @staticmethod
    def forward(ctx: Any, told: tuple[Any, ...], *tensors: Any) -> tuple[torch.Tensor | None, ...]:
        return _gradients(told, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        refuse_double_backward(ctx, *gradients)


def _gradients(
    told: tuple[Any, ...],
    dy: torch.Tensor,
    dresidual_out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """dx, dweight and dbias of rows, those that are due."""
    if is_dynamo_compiling():
        # An eager call's backward pass becomes part of a graph, by compiled autograd say.
        return gradients_by_operator(told, dy, dresidual_out, x, weight, statistics)
    norm, cast, dx_dtype, bias_dtype, wants = told
    key, found = find_gradients(norm, dy, x, weight, statistics, dresidual_out, cast, dx_dtype, bias_dtype, wants)
    if found is None:
        if dispatch_modes():
            return gradients_by_operator(told, dy, dresidual_out, x, weight, statistics)
        if not (_addressed(dy) and (dresidual_out is None or _addressed(dresidual_out))):
            return _gradients_by_torch(told, dy, dresidual_out, x, weight, statistics)
        given = {"dy": walkable(dy), "x": x, "weight": weight, "rstd": statistics}
        given |= {"dresidual_out": None if dresidual_out is None else walkable(dresidual_out)}
        if given["dy"] is not dy or given["dresidual_out"] is not dresidual_out:
            key = None
        given |= {"x_bias": None, "cast": cast, "dx_dtype": dx_dtype, "bias_dtype": bias_dtype, "wants": wants}
        found = launched_backward(norm, key, given, packed=True)
    return found.dx, found.dweight, found.dbias


def gradients_by_operator(
    told: tuple[Any, ...],
    dy: torch.Tensor,
    dresidual_out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """`_gradients` where something sees operators, and is to see this one."""
    norm, cast, dx_dtype, bias_dtype, wants = told
    mean, rstd = (
        None if statistic is None else statistic.view(x.shape[:-1])
        for statistic in unpacked(statistics, x.numel() // x.shape[-1])
    )
    given: dict[str, Any] = {"x": x, "weight": weight, "mean": mean, "rstd": rstd, "dy": walkable(dy)}
    given["wants"] = list(wants)
    given |= {"dresidual_out": None if dresidual_out is None else walkable(dresidual_out)}
    given |= {"cast": word(Cast, "cast", cast).value, "dx_dtype": dx_dtype, "bias_dtype": bias_dtype}
    found = iter(operated(BACKWARD.functions[Norm(norm)], given))
    return tuple([next(found) if name in wants else None for name in ("dx", "dweight", "dbias")])


def _addressed(gradient: torch.Tensor) -> bool:
    """Whether there is memory to read: not of several gradients at once, as autograd's is_grads_batched brings."""
    try:
        return gradient.__class__ in PLAIN and (gradient.data_ptr() != 0 or gradient.numel() == 0)
    except RuntimeError:
        return False


def _gradients_by_torch(
    told: tuple[Any, ...],
    dy: torch.Tensor,
    dresidual_out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """`_gradients` of what has no memory and may be followed by somebody, in torch's operators."""
    _, cast, dx_dtype, bias_dtype, wants = told
    mean, rstd = unpacked(statistics, x.numel() // x.shape[-1])
    dx, dweight, dbias = torch_instead.gradients(dy, dresidual_out, x, weight, mean, rstd, word(Cast, "cast", cast))
    return (
        dx.to(dx_dtype or x.dtype) if "dx" in wants else None,
        dweight.to(weight.dtype) if "dweight" in wants and weight is not None else None,
        dbias.to(bias_dtype) if "dbias" in wants else None,
    )

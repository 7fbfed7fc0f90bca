"""The gradients of the forward operators, which the backward ones compute; those have none themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from ..calls.double_backward import refuse_double_backward
from ..calls.rows import walkable
from ..codegen.model import Norm
from ..errors import GradientError

# Where the forward operators of both norms take these. The places of bias and weight_offset are of one norm each.
_X, _WEIGHT, _BIAS, _OFFSET, _RESIDUAL, _FADD, _FQUANT, _X_BIAS, _SAVE_MV, _CAST = 0, 1, 2, 3, 4, 5, 7, 8, 11, 13

Operator = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True)
class _Told:
    """What a backward pass has to know besides tensors.

    Attributes:
        stores: whether the sum is an output. It is kept then, and x is not.
        weight_offset: added to weight.
        cast: when rows are rounded.
        dtypes: of the inputs that are tensors, by their places.
        refusal: why there is nothing to compute gradients from, or None.
    """

    stores: bool
    weight_offset: float
    cast: str
    dtypes: dict[int, torch.dtype]
    refusal: str | None


def register(library: torch.library.Library, norm: Norm, forward: str, backward: str, gradients: Operator) -> None:
    """Give a norm's two operators what differentiates them.

    Args:
        library: where they are defined.
        norm: which norm.
        forward: the forward operator's name, with its namespace.
        backward: the backward operator's.
        gradients: the backward operator.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        if inputs[_FQUANT] != "none":
            raise GradientError(
                "a tensor requires a gradient and a quantised output has none; call under torch.no_grad(), or detach it"
            )
        stores = inputs[_FADD] == "pre_add_store"
        refusal = None
        if inputs[_RESIDUAL] is not None and not stores:
            refusal = "fadd 'pre_add' does not store the sum; pass fadd='pre_add_store'"
        elif not inputs[_SAVE_MV]:
            refusal = "mean and rstd were not saved; pass save_mv=True"
        ctx.told = _Told(
            stores=stores,
            weight_offset=0.0 if norm.centres else inputs[_OFFSET],
            # Of fp32 alone nothing is rounded first, whatever the sum is stored in.
            cast="after_weight" if inputs[_X].dtype is output[0].dtype is torch.float32 else inputs[_CAST],
            dtypes={place: value.dtype for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)},
            refusal=refusal,
        )
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        statistics = output[2 if stores else 1 :]
        # y, and the sum if a tensor that is summed requires a gradient.
        summed = [inputs[place] for place in (_X, _RESIDUAL, _X_BIAS)]
        sum_is_due = stores and any(tensor is not None and tensor.requires_grad for tensor in summed)
        ctx.mark_non_differentiable(*output[2 if sum_is_due else 1 :])
        if refusal is None:
            # The sum holds x_bias already.
            normalised = (output[1], None) if stores else (inputs[_X], inputs[_X_BIAS])
            ctx.save_for_backward(*normalised, inputs[_WEIGHT], *statistics)

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        told: _Told = ctx.told
        dy, dresidual_out = arrived[0], arrived[1] if told.stores else None
        if told.refusal is not None:
            raise GradientError(f"a gradient was asked of a call that kept too little for one: {told.refusal}")
        needs = ctx.needs_input_grad
        due: list[torch.Tensor | None] = [None] * len(needs)
        for place, gradient in _compute(norm, gradients, told, needs, dy, dresidual_out, ctx.saved_tensors).items():
            due[place] = gradient
        return tuple(due)

    torch.library.register_autograd(forward, differentiate, setup_context=keep, lib=library)
    torch.library.register_autograd(backward, refuse_double_backward, lib=library)


def _compute(
    norm: Norm,
    gradients: Operator,
    told: _Told,
    needs: tuple[bool, ...],
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    saved: tuple[torch.Tensor | None, ...],
) -> dict[int, torch.Tensor]:
    """The gradients that are due, by the places of what they are of."""
    if dy is None and dresidual_out is None:
        return {}
    x, x_bias, weight, *statistics = saved
    # One rounding each, also where x and residual differ: the wider of their types holds what both round. The sum of a
    # column, if x_bias went into what was stored, is taken of values that are not rounded yet.
    of_dx = [place for place in (_X, _RESIDUAL, _X_BIAS) if needs[place] and (place != _X_BIAS or told.stores)]
    types = [torch.float32 if place == _X_BIAS else told.dtypes[place] for place in of_dx]
    due = {
        "dx": bool(of_dx),
        "dweight": needs[_WEIGHT],
        "dbias": norm.centres and needs[_BIAS],
        "dx_bias": needs[_X_BIAS] and not told.stores,
    }
    wants = [name for name, wanted in due.items() if wanted]
    dx_dtype = reduce(torch.promote_types, types) if types else None
    rows = [None if gradient is None else walkable(gradient) for gradient in (dy, dresidual_out)]
    shared: tuple[Any, ...]
    if norm.centres:
        shared = (*statistics, x_bias, rows[1], told.cast, dx_dtype, told.dtypes.get(_BIAS), wants)
    else:
        shared = (*statistics, told.weight_offset, x_bias, rows[1], told.cast, dx_dtype, wants)
    found = dict(zip(wants, gradients(rows[0], x, weight, *shared), strict=True))
    by_place = {
        place: found[name]
        for place, name in ((_WEIGHT, "dweight"), (_BIAS, "dbias"), (_X_BIAS, "dx_bias"))
        if name in found
    }
    for place in of_dx:
        dx = found["dx"].flatten(0, -2).sum(0) if place == _X_BIAS else found["dx"]
        by_place[place] = dx.to(told.dtypes[place])
    return by_place

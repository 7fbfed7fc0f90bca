"""The gradients of the forward operators, which the backward ones compute; those have none themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..calls import eager
from ..calls.check import FP8_HAS_NO_GRADIENT
from ..calls.functions import FUNCTIONS
from ..calls.outputs import dtype_of_all
from ..calls.row_layout import walkable
from ..calls.traced import operated
from ..codegen.families import Kind
from ..dtypes import FP8_INPUTS
from ..errors import GradientError
from .twins import register_autograd


@dataclass(frozen=True)
class _Told:
    """What a backward pass has to know besides tensors.

    Attributes:
        stores: whether the sum is an output. It is kept then, and x is not.
        given: what was passed that is neither tensor nor decides what is kept, by name.
        dtypes: of the inputs that are tensors, by name.
        refusal: why there is nothing to compute gradients from, or None.
    """

    stores: bool
    given: dict[str, Any]
    dtypes: dict[str, torch.dtype]
    refusal: str | None


UNSAVED = "mean and rstd were not saved; pass save_mv=True"


def kept_too_little(why: str) -> GradientError:
    """The error for a gradient of a call that has nothing to compute it from."""
    return GradientError(f"a gradient was asked of a call that kept too little for one: {why}")


def register(library: torch.library.Library, namespace: str, forward: str, backward: str) -> None:
    """Give a norm's two operators what differentiates them.

    Args:
        library: where they are defined.
        namespace: under what name.
        forward: the forward operator's.
        backward: the backward operator's.
    """
    takes, computes = FUNCTIONS[forward], FUNCTIONS[backward]
    # The backward function is told them again.
    told_again = {name for name, _, _ in computes.numbers} | {name for name, _, _ in computes.words}
    shared = [name for name in takes.passed if name in told_again]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        given = dict(zip(takes.passed, inputs, strict=True))
        if given["fquant"] != "none":
            raise GradientError(
                "a tensor requires a gradient and a quantised output has none; call under torch.no_grad(), or detach it"
            )
        if given["x"].dtype in FP8_INPUTS:
            raise GradientError(
                f"a tensor requires a gradient and {FP8_HAS_NO_GRADIENT}; or call under torch.no_grad()"
            )
        if given["x"].dtype is output[0].dtype is torch.float32:
            # Of fp32 alone nothing is rounded first, whatever the sum is stored in.
            given["cast"] = "after_weight"
        stores = given["fadd"] == "pre_add_store"
        refusal = None
        if given["residual"] is not None and not stores:
            refusal = "fadd 'pre_add' does not store the sum; pass fadd='pre_add_store'"
        elif not given["save_mv"]:
            refusal = UNSAVED
        ctx.told = _Told(
            stores=stores,
            given={name: given[name] for name in shared},
            dtypes={name: value.dtype for name, value in given.items() if isinstance(value, torch.Tensor)},
            refusal=refusal,
        )
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        statistics = output[2 if stores else 1 :]
        # y, and the sum if a tensor that is summed requires a gradient.
        summed = [given[name] for name in ("x", "residual", "x_bias")]
        sum_is_due = stores and any(tensor is not None and tensor.requires_grad for tensor in summed)
        ctx.mark_non_differentiable(*output[2 if sum_is_due else 1 :])
        if refusal is None:
            # The sum holds x_bias already.
            normalised = (output[1], None) if stores else (given["x"], given["x_bias"])
            ctx.save_for_backward(*normalised, given["weight"], given["dropout_rng"], *statistics)

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        told: _Told = ctx.told
        dy, dresidual_out = arrived[0], arrived[1] if told.stores else None
        if told.refusal is not None:
            raise kept_too_little(told.refusal)
        needed = [name for name, needs in zip(takes.passed, ctx.needs_input_grad, strict=True) if needs]
        due = _compute(forward, backward, told, needed, dy, dresidual_out, ctx.saved_tensors)
        return tuple([due.get(name) for name in takes.passed])

    register_autograd(namespace, forward, differentiate, keep, library)
    tensors = [name for name, _, _ in FUNCTIONS[backward].tensors]
    register_second(library, namespace, backward, computes.passed, tensors, partial(_computed_by_torch, backward))


def register_second(
    library: torch.library.Library,
    namespace: str,
    name: str,
    passed: Sequence[str],
    tensors: Sequence[str],
    compute: Callable[[dict[str, Any]], Sequence[torch.Tensor | None]],
) -> None:
    """Give a backward operator what differentiates it, which torch's operators do.

    Args:
        library: where it is defined.
        namespace: under what name.
        name: its.
        passed: the names of its arguments, in order.
        tensors: those of them that are tensors.
        compute: from all of them, by name, to what it returns.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        ctx.told = dict(zip(passed, inputs, strict=True))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[ctx.told.pop(name) for name in tensors])

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        def computed(*operands: Any) -> Sequence[torch.Tensor | None]:
            return compute(ctx.told | dict(zip(tensors, operands, strict=True)))

        due = dict(zip(passed, ctx.needs_input_grad, strict=True))
        found = eager.differentiated(computed, ctx.saved_tensors, [due[name] for name in tensors], arrived)
        by_name = dict(zip(tensors, found, strict=True))
        return tuple([by_name.get(name) for name in passed])

    register_autograd(namespace, name, differentiate, keep, library)


def _computed_by_torch(backward: str, told: dict[str, Any]) -> list[torch.Tensor]:
    """What a backward operator returns."""
    # RMSNorm's has neither, and LayerNorm's no offset.
    given = {"mean": None, "weight_offset": 0.0, "bias_dtype": None} | told
    operands = tuple(given[name] for name in ("dy", "x", "weight", "rstd", "x_bias", "dresidual_out"))
    options = tuple(given[name] for name in ("weight_offset", "cast", "dx_dtype", "bias_dtype", "wants"))
    dropout = None
    if given["dropout_rng"] is not None:
        dropout = eager.Dropout(given["dropout_p"], given["dropout_rng"], given["dropped_dtype"])
    norm = FUNCTIONS[backward].norm.value
    found = eager.plain_gradients(operands, given["mean"], (norm, *options), dropout)
    return [getattr(found, name) for name in given["wants"]]


def _compute(
    forward: str,
    backward: str,
    told: _Told,
    needed: list[str],
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    saved: tuple[torch.Tensor | None, ...],
) -> dict[str, torch.Tensor]:
    """The gradients that are due, by the names of what they are of."""
    if dy is None and dresidual_out is None:
        return {}
    x, x_bias, weight, dropout_rng, *statistics = saved
    gradients = dict(FUNCTIONS[forward].gradients)
    if dropout_rng is not None:
        gradients["x"] = "ddropped"
    if told.stores and "x_bias" in needed and x is not None:
        # The sum holds it already. Given as zeros, it has the kernel add up dx before that is rounded.
        x_bias = x.new_zeros(x.shape[-1:], dtype=told.dtypes["x_bias"])
    # One rounding each.
    of_dx = [name for name in needed if gradients[name] == "dx"]
    types = [told.dtypes[name] for name in of_dx]
    takes = FUNCTIONS[backward]
    wanted = {gradients[name] for name in needed}
    wants = [result.name for result in takes.results if result.name in wanted]
    per_row = [name for name, kind, _ in takes.tensors if kind is Kind.PER_ROW]
    given: dict[str, Any] = {
        **told.given,
        **dict(zip(per_row, statistics, strict=True)),
        "dy": None if dy is None else walkable(dy),
        "x": x,
        "weight": weight,
        "x_bias": x_bias,
        "dresidual_out": None if dresidual_out is None else walkable(dresidual_out),
        "dropout_rng": dropout_rng,
        "dx_dtype": dtype_of_all(types) if types else None,
        "dropped_dtype": told.dtypes["x"],
        "bias_dtype": told.dtypes.get("bias"),
        "wants": wants,
    }
    found = dict(zip(wants, operated(backward, given), strict=True))
    due = {name: found[gradients[name]] for name in needed}
    due.update({name: due[name].to(told.dtypes[name]) for name in of_dx})
    return due

"""Modulated norms as operators; the backward pass of those in a traced graph is torch's operators."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import modulated, modulated_instead
from ..calls.first import refuse_foreign
from ..calls.functions import FUNCTIONS
from ..calls.outputs import LayerNormOutput
from ..codegen.parameters import MODULATED
from ..errors import GradientError


def run(function: str, given: dict[str, Any]) -> LayerNormOutput:
    """What an operator computes of its arguments by name."""
    refuse_foreign(MODULATED, given)
    norm = FUNCTIONS[function].norm.value
    offset = given.get("weight_offset", 0.0)
    options = (norm, given["eps"], offset, given["out_dtype"], given["save_mv"])
    return modulated.launched(modulated.operands_of(given), options)


def register(library: torch.library.Library, namespace: str, function: str) -> None:
    """Give a norm's operator what differentiates it."""
    takes = FUNCTIONS[function]
    operands = [row.name for row in MODULATED.inputs]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        given = dict(zip(takes.passed, inputs, strict=True))
        ctx.set_materialize_grads(False)
        ctx.saves, ctx.adds = given["save_mv"], given["residual"] is not None
        tensors = [given.get(name) for name in operands]
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        ctx.told = modulated_instead.Told(takes.norm.value, given.get("weight_offset", 0.0), dtypes)
        summed = [given[name] for name in ("x", "gate", "residual")]
        sum_is_due = ctx.adds and any(tensor is not None and tensor.requires_grad for tensor in summed)
        ctx.mark_non_differentiable(*output[2 if sum_is_due else 1 :])
        if ctx.saves:
            x, scale, shift, gate, _, weight, bias = tensors
            gated = None if gate is None else x
            *mean, rstd = output[2 if ctx.adds else 1 :]
            rows = output[1] if ctx.adds else x
            ctx.save_for_backward(rows, scale, shift, gate, gated, weight, bias, *(mean or (None,)), rstd)

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        if not ctx.saves:
            raise GradientError(
                "a gradient was asked of a call that kept too little for one: mean and rstd were not saved; pass "
                "save_mv=True"
            )
        kept = modulated_instead.Kept(*ctx.saved_tensors)
        due = dict(zip(takes.passed, ctx.needs_input_grad, strict=True))
        dresidual_out = arrived[1] if ctx.adds else None
        wanted = [due.get(name, False) for name in operands]
        found = modulated.gradients_of(kept, ctx.told, arrived[0], dresidual_out, wanted)
        by_name = dict(zip(operands, found, strict=True))
        return tuple([by_name.get(name) for name in takes.passed])

    torch.library.register_autograd(f"{namespace}::{function}", differentiate, setup_context=keep, lib=library)

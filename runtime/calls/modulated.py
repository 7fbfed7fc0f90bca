"""Calls of modulated norms: known or checked, launched, and recorded by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..codegen.families import Kind
from ..codegen.model import Norm
from ..codegen.parameters import MODULATED
from ..kernels.gpu import require_device
from ..selection import dispatch
from ..upstream.torch_autograd import applied, applied_at_once
from ..upstream.torch_dynamo import eager_only
from . import modulated_backward, modulated_instead
from .check import check
from .first import address_of, resolved
from .known import MISALIGNED, PLAIN, Found, Key, remember
from .launch import run, run_alone, run_recorded
from .outputs import LayerNormOutput, unpacked
from .plan import Plan
from .row_layout import walkable
from .straight import ModulatedOperands, ModulatedOptions, find_modulated
from .traced import dispatch_modes, is_dynamo_compiling, operated, result_dtype

# By the norm's word, because torch 2.11's TorchDynamo can make no enum of it.
FUNCTION_OF = {norm.value: name for norm, name in MODULATED.functions.items()}

# Behind the norm.
OPTIONS = tuple(row.name for row in MODULATED.parameters if row.functional and not row.kind.is_tensor)


def named(operands: ModulatedOperands, options: ModulatedOptions) -> dict[str, Any]:
    """What a call is given, but for the norm, by the names of its rows."""
    given: dict[str, Any] = {row.name: operand for row, operand in zip(MODULATED.inputs, operands, strict=True)}
    given.update(zip(OPTIONS, options[1:], strict=True))
    if options[0] == Norm.LAYER.value:
        # Kernels of LayerNorm add nothing to weights, and have no such parameter.
        del given["weight_offset"]
    return given


def operands_of(given: dict[str, Any]) -> ModulatedOperands:
    """The tensors of a call, None for those that are not there, from its arguments by name."""
    found: Any = tuple([given.get(row.name) for row in MODULATED.inputs])
    operands: ModulatedOperands = found
    return operands


def as_operands(operands: ModulatedOperands) -> ModulatedOperands:
    """Operands that kernels can walk; what they cannot is copied once."""
    found: Any = tuple([None if operand is None else walkable(operand) for operand in operands])
    rows: ModulatedOperands = found
    return rows


def records(operands: ModulatedOperands) -> bool:
    """Whether a gradient is due."""
    return torch.is_grad_enabled() and any(
        # A proxy of torch.fx is neither true nor false, and what is no tensor is refused later.
        getattr(operand, "requires_grad", False) is True
        for operand in operands
    )


def normalise_known(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """What `normalise` returns of arguments like those of a call before; None where there was none."""
    # A proxy of torch.fx records whatever it is asked.
    if operands[0].__class__ not in PLAIN:
        return None
    _, found = find_modulated(operands, options)
    if found is None:
        return None
    if options[-1]:
        return _apply((options, found), *operands)
    return run_alone(*found) if operands[4] is None else run(*found)[:2]


def normalise(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """Launch the kernel that serves arguments which were checked, recording it where `options` ask for statistics.

    Returns:
        y, and residual_out where there is a residual.
    """
    given: Any = tuple(map(resolved, operands))
    rows = as_operands(given)
    # Known is only what was launched as it was passed.
    as_passed = all(row is operand for row, operand in zip(rows, operands, strict=True))
    found = prepared(rows, options, find_modulated(rows, options)[0] if as_passed else None)
    if options[-1]:
        return _recorded((options, found), *rows)
    y, total = run(*found)[:2]
    return y if total is None else (y, total)


def normalise_traced(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """The same as one operator, and the copies before it."""
    given = named(as_operands(operands), options)
    given["out_dtype"] = given["out_dtype"] or result_dtype(options[0], given["x"])
    y, *others = operated(FUNCTION_OF[options[0]], given)
    return y if given["residual"] is None else (y, others[0])


@eager_only
def prepared(operands: ModulatedOperands, options: ModulatedOptions, key: Key | None) -> Found:
    """Check a call, make its kind known, and return what `launch.run` and `run_recorded` are to be given.

    Args:
        operands: its tensors.
        options: what else it is told.
        key: what it was looked up by; None if it cannot be known.

    Raises:
        NormforgeError: as `layernorm2d_fwd` lists them.
    """
    given = named(operands, options)
    given["out_dtype"] = given["out_dtype"] or result_dtype(options[0], given["x"])
    call = check(FUNCTION_OF[options[0]], given)
    require_device(call.x)
    plans, rows = dispatch.plans, MODULATED.inputs
    addresses = tuple(address_of(row.name, tensor) for row, tensor in zip(rows, operands, strict=True))
    plan = Plan(call, [row.slot for row, at in zip(rows, addresses, strict=True) if at & MISALIGNED])
    plain = all(tensor is None or (tensor.__class__ in PLAIN and not tensor.is_neg()) for tensor in operands)
    if key is not None and call.m and plain:
        remember(plans, key, operands, _free(operands), addresses, plan)
    return plan, addresses, operands, call.x.shape, call.m, call.eps, call.weight_offset


def launched(operands: ModulatedOperands, options: ModulatedOptions) -> LayerNormOutput:
    """A call that autograd does not see, known or not."""
    key, found = find_modulated(operands, options)
    return run(*(found or prepared(operands, options, key)))


def _free(operands: ModulatedOperands) -> list[int]:
    """Of each tensor, how many of its leading sizes may be any in a call of the same kind: how many samples there are.

    The key holds the other sizes.
    """
    leading = min(operands[0].dim() - 1, 1)
    return [
        0 if tensor is None or row.kind is Kind.VECTOR else min(leading, tensor.dim() - 1)
        for row, tensor in zip(MODULATED.inputs, operands, strict=True)
    ]


class _Modulate(torch.autograd.Function):
    """y, and residual_out where there is a residual; see `normalise`.

    Kept for the backward pass: what was normalised (x, or residual_out, which the caller holds anyway), the vectors and
    modulations, a mean and rstd a row, and x where it was gated.
    """

    @staticmethod
    def forward(ctx: Any, told: tuple[ModulatedOptions, Found], *operands: Any) -> Any:
        options, found = told
        y, total, _, _, statistics = run_recorded(*found)
        x, scale, shift, gate, residual, weight, bias = operands
        ctx.told = modulated_instead.Told(
            options[0], options[2], tuple([None if operand is None else operand.dtype for operand in operands])
        )
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        gated = None if gate is None else x
        ctx.save_for_backward(x if total is None else total, scale, shift, gate, gated, weight, bias, statistics)
        if total is None:
            return y
        if not any(operand is not None and operand.requires_grad for operand in (x, gate, residual)):
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *saved, statistics = ctx.saved_tensors
        rows = saved[0]
        statistics = unpacked(statistics, rows.numel() // rows.shape[-1])
        kept = modulated_instead.Kept(*(*saved, *statistics))
        dy, dresidual_out = arrived[0], arrived[1] if len(arrived) > 1 else None
        return None, *gradients_of(kept, ctx.told, dy, dresidual_out, ctx.needs_input_grad[1:])


def gradients_of(
    kept: modulated_instead.Kept,
    told: modulated_instead.Told,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradients of a call's operands that are due: by kernels, unless a gradient of them could be asked for."""
    seen = torch.is_grad_enabled() or is_dynamo_compiling() or dispatch_modes() > 0
    if dy is None or seen or not modulated_backward.takes(kept, dy, dresidual_out):
        return modulated_instead.gradients(kept, told, dy, dresidual_out, due)
    return modulated_backward.gradients(kept, told, dy, dresidual_out, due)


_recorded, _apply = applied(_Modulate), applied_at_once(_Modulate)

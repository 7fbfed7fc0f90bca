"""The gradients of the forward operators, which the backward ones compute, and those of the backward ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..calls.check import FP8_HAS_NO_GRADIENT
from ..calls.functions import OPERATORS, Function
from ..calls.outputs import dtype_of_all, dtypes_of, packed_of
from ..calls.record import BackwardPass
from ..calls.road import ROWS, operands_of, options_of
from ..calls.row_layout import walkable
from ..calls.traced import operator
from ..codegen.families import Kind
from ..codegen.parameters import MODULATED_GRADIENTS
from ..dtypes import FLOATS, FP8_INPUTS
from ..errors import GradientError
from .kernels import register_autograd

# The incoming gradients, and the summands of the stored sum.
_ARRIVE = ("dy", "dresidual_out")
_UNSAVED = "mean and rstd were not saved; pass save_mv=True, or of a quantised norm save_unquant=True"
_UNSTORED = "fadd 'pre_add' does not store the sum; pass fadd='pre_add_store'"
_SUMMED = ("x", "residual", "x_bias", "gate")


def register(library: torch.library.Library, forward: str, backward: str) -> None:
    """Register the gradients of a forward operator.

    Args:
        library: the library that defines the operator.
        forward: the operator's name.
        backward: the name of the operator that computes the gradients, of rows that are not modulated.
    """
    takes = OPERATORS[forward]
    of_rows = any(name == "x" and kind.has_row_stride for name, kind, _ in takes.tensors)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        args = dict(takes.defaults) | dict(zip(takes.passed, inputs, strict=True))
        # Quantised rows are modulated, or not.
        ctx.backward = backward if args.get("scale") is None else MODULATED_GRADIENTS.functions[takes.norm]
        computes = OPERATORS[ctx.backward]
        statistics = [name for name, kind, _ in computes.tensors if kind is Kind.PER_ROW]
        kept = [name for name, _, _ in computes.tensors if name not in (*_ARRIVE, *statistics)]
        ctx.kept = (*kept, *statistics)
        if not takes.family_name:
            _refuse(args)
        fadd = "none" if args.get("residual") is None else args.get("fadd", "pre_add_store")
        stores, is_after, renorms = fadd.endswith(("store", "norm")), fadd == "post_add", fadd == "post_add_norm"
        # The output that carries the gradient of y: behind the sum and the scales of a quantised y.
        at = 1 + stores + (not args["fquant"].startswith("static")) if args.get("save_unquant") else 0
        if args["x"].dtype is output[at].dtype is torch.float32:
            # With x and y in fp32 nothing is rounded before weight, whatever the dtype of the stored sum.
            args["cast"] = "after_weight"
        unsaved = None if args.get("save_unquant", args.get("save_mv", False)) else _UNSAVED
        ctx.refusal, ctx.at = _UNSTORED if fadd == "pre_add" else unsaved, at
        ctx.shared = {name: args[name] for name in takes.passed if name in computes.passed and name not in kept}
        ctx.dtypes = {name: value.dtype for name, value in args.items() if isinstance(value, torch.Tensor)}
        # The gradient of a residual that is added behind the norm is dy.
        ctx.added = ctx.dtypes.pop("residual") if is_after else None
        # A gradient that did not arrive stays None, rather than becoming M×N zeros.
        ctx.set_materialize_grads(False)
        # y, and the sum if a tensor that is summed requires a gradient.
        summed = [args.get(name) for name in (*_SUMMED, *("weight", "bias") * renorms)]
        sum_is_due = stores and any(tensor is not None and tensor.requires_grad for tensor in summed)
        # A quantised output has no gradient, although fp8 is a floating-point dtype of torch.
        carry = (at, 1)[: 1 + sum_is_due] if output[at].dtype in FLOATS else ()
        ctx.mark_non_differentiable(*[each for place, each in enumerate(output) if place not in carry])
        ctx.calls = None
        if ctx.refusal is None and renorms:
            # The statistics of the first norm come last.
            one = 1 + takes.norm.centres
            both = packed_of(*output[-one:], *output[-2 * one : -one])
            _keep_in_parts(ctx, "renormed", takes, args, output[at], output[1], both)
        elif ctx.refusal is None:
            held = {**args, "gated": None if args.get("gate") is None else args["x"]}
            if stores:
                # The sum includes x_bias already.
                held |= {"x": output[1], "x_bias": None}
            ctx.save_for_backward(*[held.get(name) for name in kept], *output[len(output) - len(statistics) :])

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        if ctx.calls is not None:
            return _differentiate_in_parts(ctx, takes, arrived[ctx.at], arrived[1])
        _refuse_unsaved(ctx.refusal)
        needed = [name for name, needs in zip(takes.passed, ctx.needs_input_grad, strict=True) if needs]
        args = ctx.shared | dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        dy = arrived[ctx.at]
        # Without a stored sum no gradient can be computed of a call that adds.
        for name, gradient in zip(_ARRIVE, (dy, arrived[1] if "residual" in ctx.dtypes else None), strict=True):
            args[name] = gradient if gradient is None or not of_rows else walkable(gradient)
        due: dict[str, torch.Tensor] = {}
        if ctx.added is not None and dy is not None and "residual" in needed:
            needed.remove("residual")
            due["residual"] = dy.to(ctx.added)
        if needed:
            due |= _compute(forward, ctx.backward, ctx.dtypes, needed, args)
        return tuple([due.get(name) for name in takes.passed])

    register_autograd(library, forward, differentiate, keep)


def register_in_parts(library: torch.library.Library, forward: str) -> None:
    """Register the gradients of a forward operator whose family computes them by other operators.

    Args:
        library: the library that defines the operator.
        forward: the operator's name.
    """
    takes = OPERATORS[forward]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        args = dict(zip(takes.passed, inputs, strict=True))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 if output[0].dtype in FLOATS else 0 :])
        ctx.refusal = "" if args.get("save_mv", True) else _UNSAVED
        # The sum, or of statistics alone the mean.
        total = output[-2] if output[1:] else None
        _keep_in_parts(ctx, takes.family_name, takes, args, output[0], total, output[-1])

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        return _differentiate_in_parts(ctx, takes, *(*arrived, None)[:2])

    register_autograd(library, forward, differentiate, keep)


def _keep_in_parts(ctx: Any, family: str, takes: Function, args: Mapping[str, Any], *made: Any) -> None:
    """Save what a family's backward pass needs of a call that made y, the sum or None, and the statistics."""
    from . import computing as computing

    y, total, statistics = made
    ctx.calls = calls = ROWS[family]
    operands = operands_of(calls, args)
    ctx.args = calls.args(options_of(calls, takes.norm.value, args), dtypes_of(operands), y.dtype)
    ctx.save_for_backward(*calls.saved(operands, total), statistics)


def _differentiate_in_parts(ctx: Any, takes: Function, dy: Any, dresidual_out: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a call that `_keep_in_parts` saved, given those of y and of the sum."""
    _refuse_unsaved(ctx.refusal)
    needed = dict(zip(takes.passed, ctx.needs_input_grad, strict=True))
    due = tuple([needed.get(name, False) for name in ctx.calls.inputs])
    grads = ctx.calls.recording.gradients(BackwardPass(ctx.saved_tensors, ctx.args, dy, dresidual_out, due))
    by_name = dict(zip(ctx.calls.inputs, grads, strict=True))
    return tuple([by_name.get(name) for name in takes.passed])


def _refuse_unsaved(refusal: str | None) -> None:
    if refusal:
        raise GradientError(f"a gradient was asked of a call that kept too little for one: {refusal}")


def _refuse(args: Mapping[str, Any]) -> None:
    """Raise an error if a call of a 2d function's operator cannot have a gradient."""
    if args["fquant"] != "none":
        raise GradientError(
            "a tensor requires a gradient and a quantised output has none; call under torch.no_grad(), or detach it"
        )
    if args["x"].dtype in FP8_INPUTS:
        raise GradientError(f"a tensor requires a gradient and {FP8_HAS_NO_GRADIENT}; or call under torch.no_grad()")


def register_second(library: torch.library.Library, name: str) -> None:
    """Register the gradients of a backward operator, computed by torch's operators.

    Args:
        library: the library that defines the operator.
        name: the operator's name.
    """
    takes = OPERATORS[name]
    tensors = [each for each, _, _ in takes.tensors]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        ctx.args = dict(zip(takes.passed, inputs, strict=True))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[ctx.args.pop(each) for each in tensors])

    def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        from ..families import eager
        from .computing import by_formula

        def computed(*operands: Any) -> Sequence[torch.Tensor | None]:
            grads = by_formula(name, ctx.args | dict(zip(tensors, operands, strict=True)))
            return [each for each in grads if each is not None]

        # Fewer where the dispatcher left defaults out.
        due = dict(zip(takes.passed, ctx.needs_input_grad, strict=False))
        grads = eager.differentiated(computed, ctx.saved_tensors, [due.get(each, False) for each in tensors], arrived)
        by_name = dict(zip(tensors, grads, strict=True))
        return tuple([by_name.get(each) for each in due])

    register_autograd(library, name, differentiate, keep)


def _compute(
    forward: str, backward: str, dtypes: Mapping[str, torch.dtype], needed: Sequence[str], saved: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the gradients that are due, by the names of their operands."""
    from .computing import by_formula, shares_no_row

    if all(saved[name] is None for name in _ARRIVE):
        return {}
    takes = OPERATORS[backward]
    gradients = dict(OPERATORS[forward].gradients)
    for operand, gradient in (("dropout_rng", "ddropped"), ("gated", "dgated")):
        if saved.get(operand) is not None:
            gradients["x"] = gradient
    if "residual" in dtypes and "x_bias" in needed:
        # The sum includes x_bias already. An x_bias of zeros makes the kernel sum dx before rounding.
        saved["x_bias"] = saved["x"].new_zeros(saved["x"].shape[-1:], dtype=dtypes["x_bias"])
    due = {name: gradients[name] for name in needed if name in gradients}
    wants = [result.name for result in takes.results if result.name in due.values()]
    for result in takes.results:
        if result.set_by:
            # One rounding each.
            types = [dtypes[name] for name, gradient in due.items() if gradient == result.name]
            saved[result.set_by] = dtype_of_all(types) if types else None
    args = {**dict(takes.defaults), **saved, "wants": wants}
    if shares_no_row(backward, args):
        outputs = by_formula(backward, args)
    else:
        outputs = operator(backward)(*[args[name] for name in takes.passed])
    grads = dict(zip(wants, [each for each in outputs if each is not None], strict=True))
    return {name: grads[gradient].to(dtypes[name]) for name, gradient in due.items()}

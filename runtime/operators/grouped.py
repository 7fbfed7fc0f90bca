"""GroupNorm as operators, forward and backward; torch's operators differentiate the second."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import eager, group
from ..calls.eager import GroupArrived, GroupNormGradients, GroupOptions
from ..errors import LayoutError
from ..upstream.torch_dynamo import eager_only
from .gradients import UNSAVED, kept_too_little, register_second
from .shortcuts import Kernel, Recording, at_once
from .twins import both, register_autograd

FORWARD, BACKWARD = group.FORWARD_OPERATOR, group.BACKWARD_OPERATOR
_SCHEMAS = {
    FORWARD: (
        "(Tensor x, Tensor? weight, Tensor? bias, int num_groups, float eps, str activation, ScalarType? out_dtype, "
        "bool save_mv) -> Tensor[]"
    ),
    BACKWARD: (
        "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, int num_groups, float eps, "
        "str activation, str[] wants) -> Tensor[]"
    ),
}


def register(library: Any, namespace: str, tags: tuple[torch.Tag, ...]) -> dict[Any, Kernel]:
    """Define both operators in a `torch.library.Library`: a kernel for all devices, a fake one, and gradients.

    Returns:
        What Inductor's code is to call in place of each.
    """
    called, known = {}, {}
    for name, run, fake in ((FORWARD, _run, _fake), (BACKWARD, _run_backward, _fake_backward)):
        for defined, kernel in both(name, run).items():
            library.define(f"{defined}{_SCHEMAS[name]}", tags=tags)
            library.impl(defined, kernel, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{defined}", fake, lib=library)
            operator = getattr(getattr(torch.ops, namespace), defined).default
            known[defined], called[operator] = kernel, at_once(operator, kernel)
    recording: Any = Recording(library, known)
    register_autograd(namespace, FORWARD, _differentiate, _keep, recording)
    register_second(recording, namespace, BACKWARD, (*_TENSORS, *_TOLD), _TENSORS, _computed_by_torch)
    return called


def _require_layout(x: torch.Tensor) -> None:
    if group.are_channels_last(x) is None:
        raise LayoutError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; this operator takes positions or channels "
            "innermost, without gaps: pass x.contiguous(), or call normforge.group_norm"
        )


@eager_only
def _run(*given: Any) -> list[torch.Tensor]:
    x, weight, bias, *told, saves = given
    _require_layout(x)
    found = group.launched(x, weight, bias, GroupOptions(*told), saves=saves)
    return [tensor for tensor in found if tensor is not None]


@eager_only
def _fake(*given: Any) -> list[torch.Tensor]:
    x, _, _, *told, saves = given
    _require_layout(x)
    options = GroupOptions(*told)
    y = x.new_empty_strided(x.shape, x.stride(), dtype=options.out_dtype or x.dtype)
    shape = (2, x.shape[0], options.num_groups)
    return [y, x.new_empty(shape, dtype=torch.float32)] if saves else [y]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weight, bias, *told, saves = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.options = GroupOptions(*told)
    ctx.saves = saves
    if saves:
        ctx.save_for_backward(x, weight, bias, *output[1:])


def _differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    if not ctx.saves:
        raise kept_too_little(UNSAVED)
    none = (None,) * 5
    if arrived[0] is None:
        return None, None, None, *none
    x, weight, bias, statistics = ctx.saved_tensors
    wants = [name for name, due in zip(GroupNormGradients._fields, ctx.needs_input_grad, strict=False) if due]
    found = group.operated_backward(GroupArrived(arrived[0], x, weight, bias, statistics, ctx.options, wants))
    return *found, *none


@eager_only
def _run_backward(*given: Any) -> list[torch.Tensor]:
    dy, x, weight, bias, statistics, *told, wants = given
    _require_layout(x)
    found = group.launched_backward(GroupArrived(dy, x, weight, bias, statistics, GroupOptions(*(*told, None)), wants))
    return [gradient for gradient in found if gradient is not None]


@eager_only
def _fake_backward(*given: Any) -> list[torch.Tensor]:
    _, x, weight, bias, *_, wants = given
    found = [x.new_empty_strided(x.shape, x.stride())] if "dx" in wants else []
    for name, vector in (("dweight", weight), ("dbias", bias)):
        if name in wants and vector is not None:
            found.append(vector.new_empty(vector.shape))
    return found


_TENSORS = (*GroupArrived._fields[:5],)
_TOLD = ("num_groups", "eps", "activation", "wants")


def _computed_by_torch(given: dict[str, Any]) -> list[torch.Tensor]:
    dy, x, weight, bias, statistics = (given[name] for name in _TENSORS)
    *told, wants = (given[name] for name in _TOLD)
    arrived = GroupArrived(dy, x, weight, bias, statistics, GroupOptions(*(*told, None)), wants)
    return [gradient for gradient in eager.group_gradients(arrived) if gradient is not None]

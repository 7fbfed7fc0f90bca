"""The kernels and gradients of GroupNorm's operators, which `registered` registers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..codegen.parameters import GROUP, GROUP_BWD
from ..dtypes import FLOATS
from ..errors import DTypeError, LayoutError
from ..upstream.torch_internals import eager_only
from .gradients import UNSAVED, kept_too_little

FORWARD, BACKWARD = (*GROUP.functions.values(), *GROUP_BWD.functions.values())


@cache
def _calls() -> Any:
    """Return the module of GroupNorm's calls, which is imported for the first one."""
    from ..families.group import row as group

    return group


def _require_layout(x: torch.Tensor) -> None:
    if _calls().are_channels_last(x) is None:
        raise LayoutError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; this operator takes positions or channels "
            "innermost, without gaps: pass x.contiguous(), or call normforge.group_norm"
        )


def _options(*told: Any) -> Any:
    """Return the options of a forward call, whose y is rounded and not quantised."""
    options = _calls().Options(*told)
    if options.out_dtype not in (None, *FLOATS):
        raise DTypeError(
            f"out_dtype is {options.out_dtype}; it takes None, torch.float16, torch.bfloat16 or torch.float32"
        )
    return options


@eager_only
def _run(*given: Any) -> list[torch.Tensor]:
    x, weight, bias, *told, saves = given
    _require_layout(x)
    found = _calls().launched(x, weight, bias, _options(*told), saves=saves)
    return [tensor for tensor in found if tensor is not None]


@eager_only
def _fake(*given: Any) -> list[torch.Tensor]:
    x, _, _, *told, saves = given
    _require_layout(x)
    options = _options(*told)
    y = x.new_empty_strided(x.shape, x.stride(), dtype=options.out_dtype or x.dtype)
    shape = (2, x.shape[0], options.num_groups)
    return [y, x.new_empty(shape, dtype=torch.float32)] if saves else [y]


def keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Save the tensors and options of a forward operator's call that its backward pass needs."""
    x, weight, bias, *told, saves = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.options = _calls().Options(*told)
    ctx.saves = saves
    if saves:
        ctx.save_for_backward(x, weight, bias, *output[1:])


def differentiate(ctx: Any, arrived: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a forward operator's arguments, computed by the backward operator."""
    if not ctx.saves:
        raise kept_too_little(UNSAVED)
    if arrived[0] is None:
        return (None,) * 8
    x, weight, bias, statistics = ctx.saved_tensors
    calls = _calls()
    wants = [name for name, due in zip(calls.Gradients._fields, ctx.needs_input_grad, strict=False) if due]
    found = calls.operated_backward(calls.Arrived(arrived[0], x, weight, bias, statistics, ctx.options, wants))
    return *found, *(None,) * 5


@eager_only
def _run_backward(*given: Any) -> list[torch.Tensor]:
    arrived = _arrived(*given)
    _require_layout(arrived.x)
    return [gradient for gradient in _calls().launched_backward(arrived) if gradient is not None]


def _arrived(
    dy: Any, x: Any, weight: Any, bias: Any, statistics: Any, num_groups: int, eps: float, activation: str, wants: Any
) -> Any:
    calls = _calls()
    return calls.Arrived(dy, x, weight, bias, statistics, calls.Options(num_groups, eps, activation, None), wants)


@eager_only
def _fake_backward(*given: Any) -> list[torch.Tensor]:
    _, x, weight, bias, *_, wants = given
    found = [x.new_empty_strided(x.shape, x.stride())] if "dx" in wants else []
    for name, vector in (("dweight", weight), ("dbias", bias)):
        if name in wants and vector is not None:
            found.append(vector.new_empty(vector.shape))
    return found


def by_formula(given: dict[str, Any]) -> Sequence[torch.Tensor | None]:
    """Compute the gradients of a backward operator's arguments by torch's operators, differentiable."""
    from ..families.eager import group_gradients

    return group_gradients(_arrived(**given))


# The kernel of each operator for all devices, and the fake kernel.
KERNELS = {FORWARD: (_run, _fake), BACKWARD: (_run_backward, _fake_backward)}

"""Serve calls of torch's own norms by kernels, with results of torch's dtypes, shapes and strides.

Calls arrive beneath autograd, autocast and torch.func, which have already run. Calls that no kernel serves fall back to
torch's own kernel, which also raises torch's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.autograd import forward_ad

from ..calls.attempt import attempted
from ..calls.check import LARGEST_FP32
from ..calls.plan import PLAIN
from ..calls.row_layout import walkable
from ..dtypes import FLOATS
from ..errors import InvarianceError
from ..families.public import layernorm2d_bwd, layernorm2d_fwd, rmsnorm2d_bwd, rmsnorm2d_fwd
from ..selection import invariance
from ..upstream.torch_internals import Kernel, dispatch_modes, eager_only, is_copied_on_write

# torch's eps for an RMSNorm whose eps is None: the machine epsilon of the dtype it computes in.
_DEFAULT_EPS = torch.finfo(torch.float32).eps

_FLOATS = frozenset(FLOATS)
# In the order of torch's output masks; RMSNorm's lacks the last.
_NAMES = ("dx", "dweight", "dbias")

Tensors = tuple["torch.Tensor | None", ...]


def serving(operator: str, torchs: Kernel) -> Kernel:
    """Return a replacement for an operator that runs torch's kernel where ours does not serve."""
    fits, run = _SERVED[operator]

    @eager_only
    def serve(keys: torch.DispatchKeySet, x: torch.Tensor, *others: Any) -> Any:
        if invariance.anywhere:
            _refuse_recorded(operator, (x, *others))
        if fits(x, *others):
            result = attempted("override_torch leaves calls to torch's own kernel", run, x, *others)
            if result is not None:
                return result
        if not dispatch_modes() and x.numel():
            invariance.refuse_torch(f"aten.{operator} of {x.dtype} on {x.device}")
        return torchs(keys, x, *others)

    return serve


def _refuse_recorded(operator: str, arguments: tuple[Any, ...]) -> None:
    """Refuse a call that is batch invariant in this thread only: torch runs its backward pass in another thread.

    Raises:
        InvarianceError: the call records a gradient and is invariant by `batch_invariant` alone.
    """
    records = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) is True for each in arguments)
    if records and invariance.is_on() and not invariance.by_default():
        raise InvarianceError(
            f"aten.{operator} is to be batch invariant (batch_invariant) and records a gradient, and torch's own "
            "backward pass does not know of it; set NORMFORGE_BATCH_INVARIANT=1 for the process, or patch the model"
        )


def _forward_fits(x: torch.Tensor, shape: Sequence[int], *others: Any) -> bool:
    *parameters, eps = others
    return _fits(x, shape, *parameters) and 0.0 <= _eps_of(eps) <= LARGEST_FP32


def _backward_fits(statistics: int, dy: torch.Tensor, x: torch.Tensor, shape: Sequence[int], *others: Any) -> bool:
    kept, parameters, due = others[:statistics], others[statistics:-1], others[-1]
    one_a_row = (*x.shape[: -len(shape)], *[1] * len(shape))
    return (
        _fits(x, shape, *parameters)
        and dy.dtype is x.dtype
        and dy.shape == x.shape
        and _readable(dy)
        and any(due)
        and all(like is not None for like in compress((x, *parameters), due))
        and all(_is_vector(statistic, (torch.float32, x.dtype), one_a_row) for statistic in kept)
    )


def _fits(x: torch.Tensor, shape: Sequence[int], *parameters: torch.Tensor | None) -> bool:
    """Return True if a kernel can serve a norm as torch's would, and no dispatch mode or AD level sees operators."""
    dimensions = len(shape)
    normalised = x.shape[-dimensions:]
    if not (
        x.dtype in _FLOATS
        and 0 < dimensions <= x.dim()
        and list(normalised) == list(shape)
        and x.numel() > 0
        and _readable(x)
        and forward_ad._current_level < 0
        and not dispatch_modes()
    ):
        return False
    # On a GPU torch takes only parameters of x's dtype; on a CPU it also takes fp32, if all parameters are fp32.
    mixes = not x.is_cuda and not _any_of_type(x.dtype, parameters)
    dtypes = (x.dtype, torch.float32) if mixes else (x.dtype,)
    return all(parameter is None or _is_vector(parameter, dtypes, normalised) for parameter in parameters)


def _is_vector(tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> bool:
    """Return True if a kernel can read a tensor in place that is to have a shape and one of some dtypes."""
    return tensor.dtype in dtypes and tensor.shape == shape and tensor.is_contiguous() and _readable(tensor)


def _any_of_type(dtype: torch.dtype, parameters: Tensors) -> bool:
    """Return True if any parameter has a dtype; None has none."""
    return any(parameter is not None and parameter.dtype is dtype for parameter in parameters)


def _readable(tensor: torch.Tensor) -> bool:
    # Asking a copy-on-write tensor for its address would copy the tensor.
    return tensor.__class__ in PLAIN and not is_copied_on_write(tensor)


def _forward(function: Callable[..., Any], x: torch.Tensor, shape: Sequence[int], *others: Any) -> Tensors:
    (*parameters, eps), dimensions = others, len(shape)
    vectors = map(_vector, parameters)
    y, _, _, *statistics = function(_rows(x, dimensions), *vectors, eps=_eps_of(eps), save_mv=True)
    # On a CPU torch saves a LayerNorm's statistics in the parameters' dtype, or x's.
    has_mean = statistics[0] is not None
    is_own = has_mean and not (x.is_cuda or _any_of_type(torch.float32, (*parameters,)))
    dtype = x.dtype if is_own else torch.float32
    return _like(x, y), *[_one_a_row(each, dimensions, dtype) for each in statistics if each is not None]


def _eps_of(eps: float | None) -> float:
    return _DEFAULT_EPS if eps is None else eps


def _backward(
    function: Callable[..., Any], names: Sequence[str], dy: torch.Tensor, x: torch.Tensor, shape: Any, *others: Any
) -> Tensors:
    """Return the gradients of x and the parameters; `names` are those of the statistics."""
    rows, (weight, *bias) = _rows(x, len(shape)), others[len(names) : -1]
    # Kernels read a number a row, in fp32.
    named: dict[str, Any] = {name: own.view(rows.shape[:-1]).float() for name, own in zip(names, others, strict=False)}
    if bias:
        named["bias_dtype"] = None if bias[0] is None else bias[0].dtype
    wants = tuple(compress(_NAMES, others[-1]))
    grads = function(_rows(dy, len(shape)), rows, _vector(weight), **named, wants=wants)
    return tuple(map(_like, (x, weight, *bias), grads))


def _rows(x: torch.Tensor, dimensions: int) -> torch.Tensor:
    return x if dimensions == 1 and x.is_contiguous() else walkable(x.flatten(-dimensions))


def _vector(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.flatten()


def _like(passed: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return a result in the shape of the tensor that was passed, which has as many elements."""
    return grad if grad is None or passed is None or passed.dim() == grad.dim() else grad.view(passed.shape)


def _one_a_row(statistic: Any, dimensions: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a statistic as torch does: of x's shape, with each normalised dimension of size 1."""
    kept: torch.Tensor = statistic.view(*statistic.shape, *[1] * dimensions)
    return kept if dtype is torch.float32 else kept.to(dtype)


# The operators of aten that are served: a predicate of a call's arguments, and the function that runs our kernels.
_MOMENTS = ("mean", "rstd")
_SERVED: Mapping[str, tuple[Callable[..., bool], Callable[..., Tensors]]] = {
    "native_layer_norm": (_forward_fits, lambda *args: _forward(layernorm2d_fwd, *args)),
    "native_layer_norm_backward": (
        partial(_backward_fits, 2),
        lambda *args: _backward(layernorm2d_bwd, _MOMENTS, *args),
    ),
    "_fused_rms_norm": (_forward_fits, lambda *args: _forward(rmsnorm2d_fwd, *args)),
    "_fused_rms_norm_backward": (
        partial(_backward_fits, 1),
        lambda *args: _backward(rmsnorm2d_bwd, _MOMENTS[1:], *args),
    ),
}
OPERATORS = tuple(_SERVED)

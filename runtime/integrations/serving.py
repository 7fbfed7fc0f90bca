"""Choose the calls of an engine's norms that a plug may serve, and run kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.attempt import attempted
from ..dtypes import FLOATS
from ..families.public import layernorm2d_fwd, rmsnorm2d_fwd
from ..selection.batch import follow
from ..settings import engine_is_invariant
from ..upstream.torch_internals import constant_in_traces

T = TypeVar("T")

_FLOATS = frozenset(FLOATS)


def fits(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> bool:
    """Return True if a kernel computes a norm over x's last dimension and no gradient is due.

    Weight and bias are vectors of x's dtype or fp32, and residual is like x.
    """
    return (
        x.dtype in _FLOATS
        and x.dim() > 0
        and not (torch.is_grad_enabled() and x.requires_grad)
        and (residual is None or (residual.dtype is x.dtype and residual.shape == x.shape))
        and all(
            vector is None or (vector.dtype in (x.dtype, torch.float32) and vector.shape == x.shape[-1:])
            for vector in (weight, bias)
        )
    )


@constant_in_traces
def follow_switch(variable: str) -> bool:
    """Make kernels batch invariant from here on if an engine's own switch is on for the process.

    Returns:
        True if the switch is on.
    """
    asks = engine_is_invariant(variable)
    if asks:
        follow(variable)
    return asks


def cast_of(weight: torch.Tensor | None) -> str:
    """Return the `cast` of vLLM's rounding: to the weight's dtype before the multiplication, and to x's dtype after."""
    narrow = weight is not None and weight.dtype is not torch.float32
    return "before_weight" if narrow else "after_weight"


def rms(
    engine: str, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None = None, **options: Any
) -> Any:
    """Return the RMSNorm of x by `rmsnorm2d_fwd`, or that of x + residual and the sum.

    Return None if no kernel serves the call; the engine then computes the norm itself.
    """
    if not fits(x, weight, residual=residual):
        return None
    if residual is not None:
        options |= {"residual": residual, "fadd": "pre_add_store"}
    out = served(_LEAVES.format(engine), rmsnorm2d_fwd, x, weight, **options)
    return out if out is None else out.y if residual is None else (out.y, out.residual_out)


def layer(engine: str, x: torch.Tensor, *vectors: torch.Tensor | None, eps: float) -> torch.Tensor | None:
    """Return the LayerNorm of x with a weight and a bias, or None if the engine has to compute it itself."""
    out = served(_LEAVES.format(engine), layernorm2d_fwd, x, *vectors, eps=eps) if fits(x, *vectors) else None
    return None if out is None else out.y


def served(whose: str, run: Callable[..., T], x: torch.Tensor, *others: Any, **named: Any) -> T | None:
    """Run a function that calls kernels and return its result; see `attempted`. Compiled calls raise their errors."""
    if is_dynamo_compiling():
        return run(x, *others, **named)
    return attempted(whose, run, x, *others, **named)


_LEAVES = "normforge leaves calls to {}'s own norms"

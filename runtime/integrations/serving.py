"""Choose the calls of an engine's norms that a plug may serve, and run kernels for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.attempt import attempted, captured
from ..calls.outputs import QuantisedOutput
from ..dtypes import FLOATS
from ..errors import NormforgeError
from ..families.public import layernorm2d_fwd, rmsnorm2d_fwd
from ..selection.batch import follow
from ..settings import engine_is_invariant
from ..upstream.torch_internals import constant_in_traces

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..parallel import AllReduceNorm

logger = logging.getLogger("normforge")

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


# The largest x of an all-reduce that kernels serve, in bytes: 2048 rows of 4096 columns in 16 bits. Each row length
# takes 2 * (ranks + 1) times as much memory.
_REDUCED_BYTES = 16 * 2**20


def reduced(
    engine: str, group: ProcessGroup, x: torch.Tensor, residual: torch.Tensor | None, *vectors: Any, **options: Any
) -> QuantisedOutput | None:
    """Add x up over the ranks of a group, add a residual and normalise the sum, all by `AllReduceNorm`.

    All ranks call it together. Return None, on all ranks alike, if the engine has to compute all of it itself: for more
    rows, in a traced call, or in a CUDA graph that is captured before any call.
    """
    n = x.shape[-1]
    most = _REDUCED_BYTES // (n * x.element_size())
    of_all = group, most, n, x.dtype, x.device
    if is_dynamo_compiling() or not 0 < x.numel() // n <= most or (of_all not in _reducers and captured(x)):
        return None
    if of_all not in _reducers:
        _reducers[of_all] = _reducer(engine, *of_all)
    kernel = _reducers[of_all]
    return None if kernel is None else served(_LEAVES.format(engine), kernel, x, residual, *vectors, **options)


# By groups and rows, for as long as the process serves.
_reducers: dict[Any, AllReduceNorm | None] = {}


def _reducer(engine: str, group: ProcessGroup, *rows: Any) -> AllReduceNorm | None:
    from ..parallel import AllReduceNorm

    *of_all, device = rows
    try:
        return AllReduceNorm(group, *of_all, device=device)
    except (NormforgeError, RuntimeError) as error:
        # Rows too long, ranks on other hosts, or GPUs that reach no other's memory.
        logger.warning("normforge leaves all-reduces to %s: %s", engine, error)
        return None


def served(whose: str, run: Callable[..., T], x: torch.Tensor, *others: Any, **named: Any) -> T | None:
    """Run a function that calls kernels and return its result; see `attempted`. Compiled calls raise their errors."""
    if is_dynamo_compiling():
        return run(x, *others, **named)
    return attempted(whose, run, x, *others, **named)


_LEAVES = "normforge leaves calls to {}'s own norms"

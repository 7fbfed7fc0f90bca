"""The seed and offset of a dropout's mask, on x's device, settled before a call is looked up.

Where the caller brings none they are drawn there by torch's generator, as torch's own dropout draws: its state goes on,
a CUDA graph draws anew at each replay, and a call that checkpoint makes again draws the same. Nothing waits for the
GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..codegen.parameters import FORWARD
from ..errors import ConflictError, DeviceError, DTypeError
from .check import check_number, check_random, refuse_sharded

_P = FORWARD["dropout_p"]
_LARGEST_I64 = 2**63 - 1


def settled(dropout_p: Any, dropout_rng: Any, x: Any, *, draws: bool = True) -> tuple[float, torch.Tensor | None]:
    """Settle what a call was given: 0.0 and None if it drops nothing, so that it is a call without dropout.

    Args:
        dropout_p: how likely an element is dropped.
        dropout_rng: seed and offset, a generator to draw them from, or None.
        x: what is normalised.
        draws: whether to draw them where they are not given.

    Raises:
        ConflictError: dropout_p is no number from 0 to below 1, or dropout_rng no integers of 64 bits.
        DTypeError, ShapeError, LayoutError, DeviceError: dropout_rng is none of what it takes, or x a DTensor.
    """
    dropout_p = check_number("dropout_p", dropout_p, least=_P.least, most=_P.most)
    if dropout_rng is None:
        draws = draws and dropout_p > 0.0 and isinstance(x, torch.Tensor)
        return dropout_p, drawn(x) if draws else None
    state = _state(dropout_rng, x, draws=draws and dropout_p > 0.0)
    return (dropout_p, state) if dropout_p else (0.0, None)


def described(dropout_p: Any, dropout_rng: Any, x: Any) -> tuple[float, torch.Tensor | None]:
    """Settle a call that computes nothing: any seed and offset take the place of drawn ones."""
    dropout_p, dropout_rng = settled(dropout_p, dropout_rng, x, draws=False)
    if dropout_p and dropout_rng is None and isinstance(x, torch.Tensor):
        dropout_rng = torch.empty(2, dtype=torch.int64, device=x.device)
    return dropout_p, dropout_rng


def drawn(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw a seed and an offset from a generator of x's device, torch's default one if None."""
    refuse_sharded(x)
    options: dict[str, Any] = {} if generator is None else {"generator": generator}
    with _beside(x):
        return torch.randint(0, _LARGEST_I64, (2,), dtype=torch.int64, device=x.device, **options)


def _state(rng: Any, x: Any, *, draws: bool) -> Any:
    if not isinstance(x, torch.Tensor):
        return rng
    if isinstance(rng, torch.Tensor):
        check_random("dropout_rng", rng, x)
        return rng
    refuse_sharded(x)
    if isinstance(rng, torch.Generator):
        if rng.device.type != x.device.type:
            raise DeviceError(
                f"dropout_rng is a generator of {rng.device} and x on {x.device}; pass one of x's device, "
                f"torch.Generator({str(x.device)!r})"
            )
        return drawn(x, rng) if draws else None
    if not isinstance(rng, tuple) or len(rng) != 2 or not all(type(number) is int for number in rng):
        raise DTypeError(
            f"dropout_rng is {rng!r}; it takes (seed, offset), an int64 tensor of the two, or a torch.Generator"
        )
    for name, number in zip(("seed", "offset"), rng, strict=True):
        if not -(2**63) <= number < 2**64:
            raise ConflictError(f"dropout_rng has {name} {number}; it takes 64 bits")
    # Filled on the device: a copy from the host would be waited for, and cannot be captured in a CUDA graph.
    with _beside(x):
        state = torch.empty(2, dtype=torch.int64, device=x.device)
    for place, number in enumerate(rng):
        state[place].fill_(number - 2**64 if number > _LARGEST_I64 else number)
    return state


def _beside(x: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context that makes tensors as x is: a fake tensor takes fake ones alone, outside of its mode too."""
    mode = None if is_dynamo_compiling() else getattr(x, "fake_mode", None)
    return nullcontext() if mode is None else mode

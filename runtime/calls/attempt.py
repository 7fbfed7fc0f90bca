"""Calls made in place of another function, which serves whatever no kernel does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import NormforgeError, PeerError
from ..kernels.obtain import only_compiled
from ..upstream.torch_internals import set_grad_enabled

logger = logging.getLogger("normforge")

T = TypeVar("T")


def attempted(whose: str, run: Callable[..., T], x: torch.Tensor, *others: Any, **named: Any) -> T | None:
    """Run `run` and return its result, or None if no kernel can serve the call.

    Args:
        whose: what leaves such a call to others, for the word about it that is said once of each kind of error.
        run: the function.
        x: its first argument. While a CUDA graph is captured on its device, only kernels that are loaded serve.
        others: its other arguments.
        named: those that it takes by name.

    Raises:
        PeerError: another rank was late in an exchange of rows.
    """
    recording = torch.is_grad_enabled()
    # Tensors may require a gradient that the caller records.
    if recording:
        set_grad_enabled(False)
    try:
        if captured(x):
            with only_compiled():
                return run(x, *others, **named)
        return run(x, *others, **named)
    except PeerError:
        # The other ranks do not leave the call to others.
        raise
    except NormforgeError as error:
        _say_once(whose, run, error)
        return None
    finally:
        if recording:
            set_grad_enabled(True)


def captured(x: torch.Tensor) -> bool:
    """Return True if a CUDA graph is being captured on x's device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


_said: set[tuple[str, Callable[..., Any], type[NormforgeError]]] = set()


def _say_once(whose: str, where: Callable[..., Any], error: NormforgeError) -> None:
    if (whose, where, type(error)) not in _said:
        _said.add((whose, where, type(error)))
        logger.warning("%s: %s", whose, error)

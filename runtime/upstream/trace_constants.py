"""What a trace takes for constant, rather than following how it is found out.

To be imported by functions while they are traced alone: what marks a function so imports TorchDynamo, for a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..calls import recorded
from ..kernels import backends

F = TypeVar("F", bound=Callable[..., object])

_constant: Callable[[F], F] = torch.compiler.assume_constant_result


@_constant
def interpreting() -> bool:
    """See `backends.interpreting`."""
    return backends.interpreting()


@_constant
def autocasts(norm: str) -> bool:
    """See `autograd.autocasts`."""
    return recorded.autocasts(norm)

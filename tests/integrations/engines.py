"""What tests of engines' norms share: rows, and how near to an engine's own norm the kernels' results are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

N = 48


def rows(dtype: torch.dtype = torch.bfloat16, m: tuple[int, ...] = (2, 3), n: int = N) -> torch.Tensor:
    return (3 * torch.randn(*m, n) + 1).to(dtype)


def alike(actual: Any, expected: Any, bits: float = 0.97) -> None:
    """Fail unless results differ in no more than the last bits of a few elements."""
    for one, other in zip(
        *((each if isinstance(each, tuple) else (each,)) for each in (actual, expected)), strict=True
    ):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        # Rounded elsewhere, one of five would have another last bit.
        assert (one == other).double().mean() >= bits


# Fails unless the results of a call are the engine's own where a function of a module may not compile a kernel, and the
# log says once what is left, and to whom. Takes the module, the function's name, what returns both results, and what.
Leaves = Callable[[Any, str, Callable[[], tuple[Any, Any]], str], None]

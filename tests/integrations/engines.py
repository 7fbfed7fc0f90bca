"""What tests of engines' norms share: rows, and how near to an engine's own norm the kernels' results are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from normforge.calls import attempt
from normforge.errors import FrozenError

N = 48


def rows(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (3 * torch.randn(2, 3, N) + 1).to(dtype)


def alike(actual: Any, expected: Any, bits: float = 0.97) -> None:
    """Fail unless results differ in no more than the last bits of a few elements."""
    for one, other in zip(
        *((each if isinstance(each, tuple) else (each,)) for each in (actual, expected)), strict=True
    ):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        # Rounded elsewhere, one of five would have another last bit.
        assert (one == other).double().mean() >= bits


class Left:
    """Calls whose kernel may not be compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self._monkeypatch, self._caplog = monkeypatch, caplog

    def hold(self, module: Any, name: str, call: Callable[[], tuple[Any, Any]], what: str) -> None:
        """Fail unless results of calls are the engine's own, and the log says so once.

        Args:
            module: where the function is looked up that a kernel serves.
            name: the function's name.
            call: what returns a result, and the engine's own.
            what: what is left, and to whom.
        """

        def refuse(*_: Any, **__: Any) -> Any:
            raise FrozenError("it would have to be compiled")

        self._monkeypatch.setattr(module, name, refuse)
        self._monkeypatch.setattr(attempt, "_said", set())
        for _ in range(2):
            alike(*call(), bits=1.0)
        says = [record.getMessage() for record in self._caplog.records if record.name == "normforge"]
        assert says == [f"normforge leaves {what}: it would have to be compiled"]

"""Count which backward passes are planned anew, and which are launched because a pass like them is known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from normforge.calls import native, record, row_gradients
from normforge.families.group import row as group
from normforge.selection import dispatch


class Looked:
    """How many backward passes were looked at, and how many were known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count the calls of what plans a pass, and the passes that a look-up in C or Python knows."""
        self.at = self.known = 0
        dispatch.forget()
        for holder, name in ((row_gradients.Backward, "gradients"), (group, "launched_backward")):
            monkeypatch.setattr(holder, name, self._counted(getattr(holder, name)))
        for module in (record, row_gradients):
            monkeypatch.setattr(module, "native", SimpleNamespace(calls=_Counted(self)))

    def _counted(self, gradients: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self.at += 1
            return gradients(*given)

        return counted

    def counts(self) -> tuple[int, int]:
        """Return both numbers since this was called last."""
        found, self.at, self.known = (self.at, self.known), 0, 0
        return found


class _Counted:
    """The look-ups that are in use, which tell a `Looked` of known passes."""

    def __init__(self, looked: Looked) -> None:
        self._looked = looked

    def __getattr__(self, family: str) -> Any:
        def known_gradients(*given: Any) -> Any:
            # The first call on a GPU replaces the look-ups by those in C.
            key, found = getattr(native.calls, family).known_gradients(*given)
            self._looked.known += found is not None
            return key, found

        return SimpleNamespace(known_gradients=known_gradients)

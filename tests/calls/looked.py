"""Count which backward passes are planned anew, and which are launched because a pass like them is known."""

from __future__ import annotations

from typing import Any

import pytest

from normforge.selection import dispatch


class Looked:
    """How many backward passes were looked at, and how many were known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: tuple[Any, str], runs: tuple[Any, str]) -> None:
        """Count calls of two functions, each named by what holds it: one plans a pass, the other runs a known one."""
        self.at = self.known = 0
        gradients, launched = getattr(*looks), getattr(*runs)

        def counted(*given: Any) -> Any:
            self.at += 1
            return gradients(*given)

        def counted_known(*given: Any) -> Any:
            self.known += 1
            return launched(*given)

        dispatch.forget()
        monkeypatch.setattr(*looks, counted)
        monkeypatch.setattr(*runs, counted_known)

    def counts(self) -> tuple[int, int]:
        """Return both numbers since this was called last."""
        found, self.at, self.known = (self.at, self.known), 0, 0
        return found

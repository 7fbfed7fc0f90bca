"""Functions that tell when they were called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def counted(patch: pytest.MonkeyPatch, *places: tuple[Any, str, str]) -> list[str]:
    """Return a list that functions, each a module's and its name there, add a word to whenever they have returned."""
    words: list[str] = []

    def counting(function: Callable[..., Any], word: str) -> Callable[..., Any]:
        def count(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            words.append(word)
            return result

        return count

    for module, name, word in places:
        patch.setattr(module, name, counting(getattr(module, name), word))
    return words

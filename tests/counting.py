"""Functions that tell when they were called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def counted(names: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that adds its name to a list whenever it has returned."""

    def count(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        names.append(name)
        return result

    return count

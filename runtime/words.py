"""From the words and integers a caller may pass to the enums used inside."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from .errors import ConflictError

E = TypeVar("E", bound=Enum)


def word(kind: type[E], argument: str, value: object) -> E:
    """The member of `kind` that a caller means: the member itself, its word, or ck_tile's integer.

    Raises:
        ConflictError: the value is none of them.
    """
    if isinstance(value, kind):
        return value
    for member in kind:
        if isinstance(value, str) and value == member.value:
            return member
        # No bool, although True == 1.
        if type(value) is int and value == getattr(member, "code", None):
            return member
    words = ", ".join(repr(m.value) + (f" ({m.code})" if hasattr(m, "code") else "") for m in kind)
    raise ConflictError(f"{argument}={value!r} is no mode; it takes {words}")

"""From the words and integers a caller may pass to the enums used inside."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from .codegen.groups import Activation
from .codegen.values import (
    Cast,
    FusedAdd,
    FusedQuant,
    GateActivation,
    Gating,
    Norm,
    Rounding,
    ScaleFormat,
    ScaleGroup,
    ScaleLayout,
)
from .errors import ConflictError

E = TypeVar("E", bound=Enum)

# By what may stand for a member: TorchDynamo traces a look-up here, where torch 2.11's cannot go through an enum.
_WORDS: dict[type[Enum], dict[str, Enum]] = {
    kind: {member.value: member for member in kind}
    for kind in (
        Norm,
        FusedAdd,
        FusedQuant,
        Rounding,
        Cast,
        Activation,
        Gating,
        GateActivation,
        ScaleGroup,
        ScaleFormat,
        ScaleLayout,
    )
}
_CODES: dict[type[Enum], dict[int, Enum]] = {
    kind: {member.code: member for member in kind} for kind in (FusedAdd, FusedQuant, ScaleGroup)
}


def word(kind: type[E], argument: str, value: object) -> E:
    """The member of `kind` that a caller means: the member itself, its word, or its integer: ck_tile's, or a size.

    Raises:
        ConflictError: the value is none of them.
    """
    if isinstance(value, kind):
        return value
    words, codes = _WORDS[kind], _CODES.get(kind, {})
    found: Enum | None = None
    if isinstance(value, str):
        found = words.get(value)
    elif type(value) is int:
        # No bool, although True == 1.
        found = codes.get(value)
    if found is None:
        raise ConflictError(f"{argument}={value!r} is no mode; it takes {_listed(words, codes)}")
    assert isinstance(found, kind)
    return found


def _listed(words: dict[str, Enum], codes: dict[int, Enum]) -> str:
    numbers = {member: code for code, member in codes.items()}
    return ", ".join(f"{name!r}" + (f" ({numbers[member]})" if codes else "") for name, member in words.items())

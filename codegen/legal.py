"""List every combination of axes that `Mode` accepts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from .errors import IllegalCombinationError
from .model import Mode
from .values import (
    INPUT_DTYPES,
    Cast,
    Columnwise,
    Direction,
    DType,
    DyFormat,
    FusedAdd,
    FusedQuant,
    GateActivation,
    Gating,
    Norm,
    Reduce,
    Rounding,
    ScaleFormat,
    ScaleGroup,
    ScaleLayout,
)


def legal_modes() -> Iterator[Mode]:
    """Yield every combination of axes that `Mode` accepts, in the order of its fields."""
    bools = (False, True)
    rest = tuple(itertools.product(bools, bools, INPUT_DTYPES, Rounding, Direction, Cast))
    kinds = itertools.product(Norm, DType, DType, FusedAdd, FusedQuant)
    for values in ((*kind, *others) for kind in kinds if _is_legal(*kind) for others in rest):
        with suppress(IllegalCombinationError):
            mode = Mode(*values)
            yield mode
            # If the mode itself is illegal, so are the forms below.
            with suppress(IllegalCombinationError):
                yield replace(mode, dropout=True)
            with suppress(IllegalCombinationError):
                yield replace(mode, statistics_only=True)
            with suppress(IllegalCombinationError):
                for dy in tuple(DyFormat)[1:]:
                    yield replace(mode, dy_format=dy)
            yield from _gated(mode)
            yield from _reduced(mode)
            if mode.is_backward:
                yield from _quantised_gradients(mode)
            for served in _served(mode):
                yield served
                yield from _reduced(served)
            for gated in bools:
                with suppress(IllegalCombinationError):
                    modulated = replace(mode, modulated=True, x_gate=gated)
                    yield modulated
                    yield from _served(modulated)


def _is_legal(norm: Norm, dtype_in: DType, dtype_out: DType, fadd: FusedAdd, fquant: FusedQuant) -> bool:
    """Return True if a mode with these words is legal, forward or backward; if not, neither is any form of the mode."""
    for direction in Direction:
        with suppress(IllegalCombinationError):
            Mode(norm, dtype_in, dtype_out, fadd, fquant, direction=direction)
            return True
    return False


def _gated(mode: Mode) -> Iterator[Mode]:
    """Yield the gated forms of a mode, which are either all legal or all illegal."""
    forms = itertools.product((Gating.AFTER_NORM, Gating.BEFORE_NORM), GateActivation, (False, True))
    with suppress(IllegalCombinationError):
        for gating, activation, grouped in forms:
            yield replace(mode, gating=gating, gate_activation=activation, grouped=grouped)


def _served(mode: Mode) -> Iterator[Mode]:
    """Yield the forms of a mode that inference engines ask for."""
    if mode.fquant.quantises:
        # If a second output is illegal, so are all these forms.
        with suppress(IllegalCombinationError):
            bare: dict[str, Any] = {"fadd": FusedAdd.NONE, "x_bias": False, "x_gate": False, "cast": Cast.AFTER_WEIGHT}
            kind = replace(mode, save_unquant=True, **bare)
            # A quantised sum behind the norm has no plain form, so its forms are listed with those of a stored sum.
            behind = (FusedAdd.POST_ADD,) if mode.fadd is FusedAdd.PRE_ADD_STORE else ()
            if mode.fadd is not FusedAdd.PRE_ADD:
                for fadd, form in itertools.product((mode.fadd, *behind), _forms(kind)):
                    # A bias on x leaves no columns.
                    with suppress(IllegalCombinationError):
                        yield replace(mode, fadd=fadd, **form)


def _reduced(mode: Mode) -> Iterator[Mode]:
    """Yield the forms of a mode behind an all-reduce."""
    with suppress(IllegalCombinationError):
        for reduce in tuple(Reduce)[1:]:
            yield replace(mode, reduce=reduce)


def _quantised_gradients(mode: Mode) -> Iterator[Mode]:
    """Yield the forms of a backward mode that quantise dx along rows and columns."""
    names = ("dtype_out", "group_size", "scale_format", "scale_layout", "columnwise")
    dtypes = (DType.FP8_E4M3FN, DType.FP8_E5M2)
    for values in itertools.product(dtypes, ScaleGroup, ScaleFormat, ScaleLayout, tuple(Columnwise)[1:]):
        form: dict[str, Any] = dict(zip(names, values, strict=True))
        with suppress(IllegalCombinationError):
            quantising = replace(mode, fquant=FusedQuant.DYNAMIC, **form)
            yield quantising
            for dy in tuple(DyFormat)[1:]:
                yield replace(quantising, dy_format=dy)


@cache
def _forms(kind: Mode) -> tuple[dict[str, Any], ...]:
    """Return the legal quantised forms of modes that differ from `kind` in the sum, x's bias or gate, or the cast."""
    bools = (False, True)
    forms = []
    # fp4 has no plain form, so its forms are listed with those of one fp8 dtype.
    dtypes = (kind.dtype_out, *((DType.FP4_E2M1FN,) if kind.dtype_out is DType.FP8_E4M3FN else ()))
    scales = ("dtype_out", "group_size", "scale_format", "scale_layout")
    for values in itertools.product(dtypes, ScaleGroup, ScaleFormat, ScaleLayout):
        scaled: dict[str, Any] = dict(zip(scales, values, strict=True))
        with suppress(IllegalCombinationError):
            # If this form is illegal, so are all forms derived from it.
            replace(kind, **scaled)
            flags = ("scale_ub", "quantise_rounded", "save_unquant", "save_amax", "columnwise")
            for further in itertools.product(bools, bools, bools, bools, Columnwise):
                form = scaled | dict(zip(flags, further, strict=True))
                with suppress(IllegalCombinationError):
                    # The unchanged mode is yielded elsewhere.
                    if replace(kind, **form) != replace(kind, save_unquant=False):
                        forms.append(form)
    return tuple(forms)

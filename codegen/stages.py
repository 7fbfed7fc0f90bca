"""The stages of kernels around the norm itself: how the row that is normalised comes to be, and what becomes of it."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """One step; the value is its macro's name, and the order here is that in which kernels take them.

    Which of them a mode has is `Mode.prologue` and `Mode.epilogue`. What they are to gradients is in
    templates/gradients.j2.
    """

    # The prologue, which makes s, in templates/prologue.j2.
    X = "x"  # x, as it is read
    X_SCALE = "x_scale"  # or, if it is fp8, times its scale
    X_BIAS = "x_bias"  # plus a bias
    X_GATE = "x_gate"  # times a sample's gate
    GATE_BEFORE = "gate_before"  # times an activated gate of x's shape
    DROPOUT = "dropout"  # some of it dropped, the rest scaled
    RESIDUAL = "residual"  # plus the residual
    STORED = "stored"  # rounded as the sum is stored

    # The epilogue, which makes y of the normalised row, in templates/epilogue.j2.
    CAST = "cast"  # rounded to 16 bits
    WEIGHT = "weight"  # times weight, plus bias
    MODULATION = "modulation"  # times 1 + a sample's scale, plus its shift
    GATE_AFTER = "gate_after"  # times an activated gate of x's shape
    ROUNDING = "rounding"  # rounded to x's type, as what is quantised
    UNQUANTISED = "unquantised"  # stored in x's type, beside what is quantised
    SMOOTH = "smooth"  # times a smooth scale

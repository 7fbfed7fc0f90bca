"""The stages of kernels around the norm: those that compute the row to normalise, and those after the norm."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """One step; the value is the name of its macro, and kernels take the steps in the order of this enum.

    `Mode.prologue` and `Mode.epilogue` list the stages of a mode. templates/gradients.j2 has the stages' gradients.
    """

    # The prologue computes s, in templates/prologue.j2.
    X = "x"  # x as read
    REDUCED = "reduced"  # the sum of all ranks' x, plus the residual, rounded to the dtype that is stored
    X_SCALE = "x_scale"  # an fp8 x times its scale
    X_BIAS = "x_bias"  # plus a bias
    X_GATE = "x_gate"  # times a sample's gate
    GATE_BEFORE = "gate_before"  # times an activated gate of x's shape
    RENORMED = "renormed"  # x normalised by the first of two norms, plus the residual
    DROPOUT = "dropout"  # some elements dropped, the others scaled
    RESIDUAL = "residual"  # plus the residual
    STORED = "stored"  # rounded to the dtype of the stored sum

    # The epilogue computes y from the normalised row, in templates/epilogue.j2.
    CAST = "cast"  # rounded to 16 bits
    WEIGHT = "weight"  # times weight, plus bias
    MODULATION = "modulation"  # times 1 + a sample's scale, plus its shift
    GATE_AFTER = "gate_after"  # times an activated gate of x's shape
    RESIDUAL_AFTER = "residual_after"  # plus the residual
    ROUNDING = "rounding"  # rounded to x's dtype before quantisation
    UNQUANTISED = "unquantised"  # stored in x's dtype as well
    SMOOTH = "smooth"  # times a smooth scale
    LARGEST = "largest"  # counted in the largest magnitude of all rows
    DEQUANTISED = "dequantised"  # backward alone: an fp8 dy times the scales of its groups

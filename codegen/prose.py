"""Describe modes in words, for modules' docstrings, lists of instances, and output of commands."""

from __future__ import annotations

from functools import lru_cache

from .groups import AnyMode, GroupMode
from .model import Mode
from .values import DType, Reduce, Rounding

_EXCHANGES = {
    Reduce.ONE_SHOT: "x added up over ranks",
    Reduce.TWO_SHOT: "x added up over ranks in two steps",
    Reduce.SCATTER: "x added up over ranks and scattered",
    Reduce.GATHER: "rows gathered from all ranks",
}


# Lists have the instances of a mode in sequence, so one cached entry is enough.
@lru_cache(maxsize=1)
def summary(mode: AnyMode) -> str:
    """Return one line that says what a kernel of a mode does."""
    return ", ".join((title(mode), *features(mode)))


def title(mode: AnyMode) -> str:
    """Return the input dtype, the norm and the direction."""
    if isinstance(mode, GroupMode):
        norm = "GroupNorm" if mode.span.is_group else f"{mode.span.norm.row.title} over channels"
    else:
        norm = mode.norm.row.title
    return f"{mode.dtype_in.value} {norm} {mode.direction.title}"


def features(mode: AnyMode) -> tuple[str, ...]:
    """Return what a mode does beyond the bare norm, in the order of computation."""
    if isinstance(mode, GroupMode):
        return _of_groups(mode)
    return _backward(mode) if mode.is_backward else _forward(mode)


def _of_groups(mode: GroupMode) -> tuple[str, ...]:
    silu = ("through SiLU" if mode.is_backward else "SiLU applied",) if mode.activation.is_applied else ()
    return (*silu, *(("channels last",) if mode.channels_last else ()))


def _forward(mode: Mode) -> tuple[str, ...]:
    steps = []
    if mode.dtype_in.is_fp8:
        steps.append("x multiplied by its scale")
    if mode.reduce.exchanges:
        steps.append(_EXCHANGES[mode.reduce])
    if mode.x_bias:
        steps.append("x bias added")
    if mode.x_gate:
        steps.append("x gated")
    if mode.dropout:
        steps.append("dropout")
    if mode.fadd.renorms:
        steps.append("residual added behind a first norm and the sum stored")
    elif mode.fadd.stores:
        steps.append("residual added and the sum stored")
    elif mode.fadd.is_before:
        steps.append("residual added")
    if mode.gating.is_before:
        steps.append(_gated(mode))
    if mode.cast.comes_first:
        steps.append("rounded before the weight")
    if mode.grouped:
        steps.append("a weight for each group of columns")
    if mode.modulated:
        steps.append("modulated")
    if mode.gating.is_after:
        steps.append(_gated(mode))
    if mode.fadd.is_after:
        steps.append("residual added behind the norm")
    if mode.fquant.quantises:
        steps += _quantised(mode)
    elif mode.dtype_out is not mode.dtype_in:
        steps.append(f"{mode.dtype_out.value} output")
    if mode.columnwise.writes:
        steps.append(_columns(mode))
    if mode.save_amax:
        steps.append("amax saved")
    if mode.stores_statistics:
        saved = "mean and rstd saved" if mode.norm.centres else "rstd saved"
        steps.append(f"{saved} without y" if mode.statistics_only else saved)
    return tuple(steps)


def _backward(mode: Mode) -> tuple[str, ...]:
    steps = []
    if mode.dy_format.is_fp8:
        of = "row" if mode.dy_format.group == "N" else f"group of {mode.dy_format.group}"
        steps.append(f"dy of {mode.dy_format.dtype.value} multiplied by a scale per {of}")
    if mode.x_bias:
        steps.append("x bias added and its gradient summed")
    if mode.dropout:
        steps.append("dropout")
    if mode.fadd.stores:
        steps.append("gradient of the stored sum added")
    if mode.cast.comes_first:
        steps.append("rows rounded before the weight")
    if mode.modulated:
        steps.append("modulated")
    if mode.x_gate:
        steps.append("x gated")
    if mode.gating.gates:
        steps.append(_gated(mode))
    if mode.grouped:
        steps.append("a weight for each group of columns")
    if mode.columnwise.writes:
        steps += [f"dx quantised too: {_quantised(mode)[0]}", _columns(mode)]
    return tuple(steps)


def _columns(mode: Mode) -> str:
    whole = "" if mode.group_size.code else "whole "
    return f"{whole}columns quantised too{', transposed' if mode.columnwise.transposes else ''}"


def _gated(mode: Mode) -> str:
    return f"{'x' if mode.gating.is_before else 'y'} gated by {mode.gate_activation.value}"


def _quantised(mode: Mode) -> list[str]:
    steps = []
    if mode.save_unquant:
        steps.append("y stored unquantised too")
    if mode.quantise_rounded:
        steps.append("rounded before it is quantised")
    smooth = "smooth " if mode.fquant.smooths else ""
    scales = "" if mode.scale_dtype is DType.FP32 else f" with {mode.scale_dtype.value} scales"
    rounding = ", truncating" if mode.rounding is Rounding.TRUNCATE else ""
    steps.append(f"{smooth}{_scaled(mode)} {mode.dtype_out.value} output{_in_groups(mode)}{scales}{rounding}")
    return steps


def _scaled(mode: Mode) -> str:
    """Return how y is scaled."""
    if mode.fquant.is_static:
        return "statically scaled by column" if mode.fquant.takes_column_scales else "statically scaled"
    return "bounded dynamic" if mode.scale_ub else "dynamic"


def _in_groups(mode: Mode) -> str:
    """Return the format and layout of groups' scales."""
    if not mode.group_size.code:
        return ""
    words = [f" by groups of {mode.group_size.value}"]
    if mode.scale_format.rounds_up:
        single = "" if mode.scale_format.stores_exponents else "fp32 "
        words.append(f"with {'packed ' if mode.scale_format.packs > 1 else single}powers of two")
    if mode.scale_format.takes_global:
        words.append("with e4m3 scales under a global one")
    if mode.scale_layout.swizzles:
        words.append("in tiles of 128x4")
    return " ".join(words)

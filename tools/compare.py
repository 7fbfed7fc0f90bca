"""How far a kernel's outputs may be from the oracle's, and whether they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from ..calls.outputs import ColumnwiseOutput, LayerNormOutput, NormGradients, QuantisedGradients, QuantisedOutput
from ..codegen.model import Mode
from ..codegen.values import Rounding
from ..dtypes import DTYPES
from ..families.operands import GroupNormGradients
from ..reference.gradients import ReferenceGradients
from ..reference.norms import ReferenceOutput, quantise
from ..reference.quantised import (
    VALUE_ERROR,
    VANISHING,
    ReferenceQuantised,
    columnwise,
    next_power_of_two,
    scale_of,
    under,
    unpacked,
    unswizzled,
)


class GatedGradients(NamedTuple):
    """Gradients of a gated norm; only LayerNorm has dbias."""

    dx: torch.Tensor | None
    dgate: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


class ModulatedGradients(NamedTuple):
    """Gradients of a modulated norm, each with the shape and dtype of its operand; None without the operand."""

    dx: torch.Tensor | None
    dscale: torch.Tensor | None
    dshift: torch.Tensor | None
    dgate: torch.Tensor | None
    dresidual: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None


class Finding(NamedTuple):
    """One output's worst error, the tolerance it is held to, and whether it holds."""

    name: str
    error: float
    tolerance: float
    ok: bool


class Tolerance(NamedTuple):
    """|actual - expected| <= atol + rtol |expected|."""

    atol: float
    rtol: float


def worst_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding of each output, from those of its parts."""
    worst: dict[str, Finding] = {}
    for finding in findings:
        so_far = worst.setdefault(finding.name, finding)
        worst[finding.name] = Finding(
            finding.name,
            max(so_far.error, finding.error),
            max(so_far.tolerance, finding.tolerance),
            so_far.ok and finding.ok,
        )
    return tuple(worst.values())


# Half a unit in the last place of the stored type is due to the oracle's own rounding, half to the kernel's.
TOLERANCES = {
    torch.float16: Tolerance(2e-5, 1e-3),
    torch.bfloat16: Tolerance(2e-5, 8e-3),
    torch.float32: Tolerance(2e-5, 1e-5),
}
STATISTICS = Tolerance(1e-5, 1e-5)

# y_scale is held to 1e-5, so z / y_scale is known to that much of qmax: a value so near a rounding boundary may fall
# either way.
QUANTISATION_SLACK = 1e-5


def compare(actual: LayerNormOutput, expected: ReferenceOutput, rounding: Rounding = Rounding.NEAREST) -> list[Finding]:
    """Hold every output of a call against the oracle's.

    Floats are held to `TOLERANCES` of their dtype. `residual_out` must be equal to the bit, or what the oracle leaves
    open. Quantised values are held to the scale that was stored: each must be at most one step from z / y_scale, or
    from what fp32 may take for it (`VALUE_ERROR`), and the rounding of a value within `QUANTISATION_SLACK` of it. A row
    whose oracle is not finite must not be finite either. An output that is missing, was not asked for, or is of another
    shape or dtype is infinitely wrong.

    Returns:
        A finding for each output there is, in the order of `LayerNormOutput`; `error` is in units of the
        output (steps for quantised ones, differing elements for residual_out).
    """
    findings = []
    for name in LayerNormOutput._fields:
        got, want = getattr(actual, name), getattr(expected, name)
        if got is None and want is None:
            continue
        if got is None or want is None or got.shape != want.shape or got.dtype != want.dtype:
            findings.append(Finding(name, math.inf, 0.0, ok=False))
        elif name == "residual_out":
            differing = unequal(got, want) if expected.sums is None else _outside(got, *expected.sums)
            findings.append(Finding(name, differing, 0.0, differing == 0))
        elif name == "y" and expected.y_scale is not None:
            findings.append(_quantised(actual, expected, rounding))
        else:
            findings.append(_close(name, got, want, _open(name, expected)))
    return findings


def numbers_of(
    scale: torch.Tensor, mode: Mode, shape: torch.Size, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the numbers that a quantised call divided its values by, (..., G), from scales in any storage format.

    Args:
        scale: as it was returned.
        mode: the call's.
        shape: of the numbers.
        global_scale: what scales stand under, if they do.
    """
    if not mode.group_size.code:
        return scale.double().reshape(shape)
    if not mode.scale_format.stores_bytes:
        return scale.double()
    codes = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if mode.scale_layout.swizzles:
        codes = unswizzled(codes, math.prod(shape[:-1]), shape[-1]).view(shape)
    codes = codes[..., : shape[-1]]
    if global_scale is not None:
        return under(global_scale, codes.contiguous().view(torch.float8_e4m3fn).double())
    codes = codes.int()
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.double() - 127))


def compare_quantised(
    actual: QuantisedOutput | ColumnwiseOutput, scale: torch.Tensor | None, expected: ReferenceQuantised
) -> list[Finding]:
    """Hold every output of a call of `quantised_layer_norm` or `quantised_rms_norm` against the oracle's.

    As `compare` does. A scale that is a power of two may be the next one where fp32 leaves that open.

    Args:
        actual: what was returned.
        scale: of each group the scale that was stored, as a number, (..., G); None where it was given.
        expected: what should have been.
    """
    findings = [] if scale is None else [_scales(actual, scale, expected)]
    wide = expected.scale if scale is None else expected.spread(scale)
    findings.append(_within_a_step(actual.y, expected, wide))
    for name in ("residual_out", "unquantised", "mean", "rstd"):
        got, want = getattr(actual, name, None), getattr(expected.rows, "y" if name == "unquantised" else name)
        if (first := getattr(actual, f"first_{name}", None)) is not None and got is not None:
            # The oracle of two norms has the statistics of both in one tensor.
            got = torch.stack((first, got), -1)
        if got is None:
            continue
        if want is None or got.shape != want.shape or got.dtype != want.dtype:
            findings.append(Finding(name, math.inf, 0.0, ok=False))
        elif name == "residual_out":
            sums = expected.rows.sums
            differing = unequal(got, want) if sums is None else _outside(got, *sums)
            findings.append(Finding(name, differing, 0.0, differing == 0))
        elif name == "unquantised":
            findings.append(_close("y", got, want, _open("y", expected.rows))._replace(name=name))
        else:
            # A mean is known to a part of the deviation, from which the terms of a row may cancel.
            rstd = expected.rows.rstd
            either = 0.0 if name == "rstd" or rstd is None else STATISTICS.rtol / rstd.double()
            findings.append(_close(name, got, want, either))
    return findings


def columns_of(actual: ColumnwiseOutput | QuantisedGradients, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y quantised along columns, (N, M), and the numbers that blocks were divided by, (N, B)."""
    data, scale = actual.columnwise, actual.columnwise_scale
    assert data is not None
    assert scale is not None
    if not mode.columnwise.transposes:
        data, scale = data.flatten(0, -2).t(), scale if mode.scale_layout.swizzles else scale.t()
    shape = torch.Size((data.shape[0], -(-data.shape[1] // (mode.group_size.code or data.shape[1]))))
    return data, numbers_of(scale, mode, shape)


def compare_columns(
    columns: tuple[torch.Tensor, torch.Tensor], rows: ReferenceQuantised, first: int = 0
) -> list[Finding]:
    """Hold what `columns_of` returns for some rows, from the first row of a block on, against the oracle's rows."""
    # One scale per column is that of all rows.
    size = rows.size if columns[1].shape[1] > 1 else columns[0].shape[1]
    expected = columnwise(rows, size)
    last = first + expected.z.shape[1]
    data, scale = columns[0][:, first:last], columns[1][:, first // size : -(-last // size)]
    findings = compare_quantised(QuantisedOutput(data, None, None, None), scale, expected)
    names = {"y": "columnwise", "y_scale": "columnwise_scale"}
    return [finding._replace(name=names[finding.name]) for finding in findings]


def compare_amax(amax: torch.Tensor, rows: Iterable[ReferenceQuantised]) -> Finding:
    """Hold max|y| of all rows against the oracle's."""
    want, slack = (torch.stack([each(part) for part in rows]).amax() for each in (_largest, _largest_error))
    error = (amax.double().reshape(()) - want).abs()
    is_close = torch.where(want.isfinite(), error <= slack, ~amax.isfinite().all())
    return Finding("amax", _worst(error), float(slack), bool(is_close))


def _largest(rows: ReferenceQuantised) -> torch.Tensor:
    return rows.z.abs().amax()


def _largest_error(rows: ReferenceQuantised) -> torch.Tensor:
    return (rows.open + VALUE_ERROR * rows.terms).amax() + STATISTICS.rtol * rows.z.abs().amax()


def _scales(actual: QuantisedOutput | ColumnwiseOutput, scale: torch.Tensor, expected: ReferenceQuantised) -> Finding:
    amax, qmax = expected.amax, DTYPES[actual.y.dtype].qmax
    slack = _scale_tolerance(torch.float32).rtol * amax
    slack += expected.largest(expected.open + VALUE_ERROR * expected.terms)
    least, most = ((amax + sign * slack).clamp_min(0) / qmax for sign in (-1, 1))
    # A scale too small to be inverted is stored as 1.
    is_none = (scale == 1) & (least <= torch.finfo(torch.float32).smallest_normal)
    if expected.global_scale is not None:
        least, most = (scale_of(each * qmax, qmax, expected.kind, expected.global_scale) for each in (least, most))
        scale, least, most = (torch.where(each == VANISHING, 0.0, each) for each in (scale, least, most))
    elif expected.kind.rounds_up:
        least, most = next_power_of_two(least), next_power_of_two(most)
    error = torch.where(is_none | ~amax.isfinite(), 0.0, torch.maximum(least - scale, scale - most).clamp_min(0))
    fits = torch.where(amax.isfinite(), is_none | (error == 0), ~scale.isfinite())
    return Finding("y_scale", _worst(error), 0.0, bool(fits.all()))


def _within_a_step(y: torch.Tensor, expected: ReferenceQuantised, scale: torch.Tensor) -> Finding:
    """See `_quantised`."""
    if y.shape != expected.y.shape or y.dtype != expected.y.dtype:
        return Finding("y", math.inf, 1.0, ok=False)
    finite = scale.isfinite() & expected.z.isfinite()
    out, scale = DTYPES[y.dtype], scale[finite]
    ratio, error = expected.z[finite] / scale, (VALUE_ERROR * expected.terms[finite] + expected.open[finite]) / scale
    slack = QUANTISATION_SLACK * out.qmax + error
    elements = unpacked(y) if out.is_fp4 else y
    got, low, least, most, high = (
        _steps(value)
        for value in (
            elements[finite],
            *[quantise(value, out) for value in (ratio - slack, ratio - error, ratio + error, ratio + slack)],
        )
    )
    steps = _worst(torch.maximum(least - got, got - most).clamp_min(0))
    return Finding("y", steps, 1.0, steps <= 1 and bool(((low <= got) & (got <= high)).all()))


def _open(name: str, expected: ReferenceOutput) -> torch.Tensor | float:
    """How much further an output may be off, because fp32 leaves open which way a row is rounded before the weight."""
    if expected.open is None:
        return 0.0
    if name == "y":
        return expected.open
    return expected.open.amax(-1) / DTYPES[expected.y.dtype].qmax if name == "y_scale" else 0.0


def _tolerance(name: str, dtype: torch.dtype) -> Tolerance:
    if name == "y":
        return TOLERANCES[dtype]
    return _scale_tolerance(dtype) if name == "y_scale" else STATISTICS


# An fp32 sum's rounding errors, in units of what its terms add up to without their signs.
SUM_ERROR = 2e-6


def compare_gradients(
    actual: NormGradients | GatedGradients | ModulatedGradients | GroupNormGradients,
    expected: ReferenceGradients,
    due: Collection[str] = (),
) -> list[Finding]:
    """Hold every gradient that was computed against the oracle's.

    Each may be off by `SUM_ERROR` of the magnitudes it is a sum of, and by the rounding of its dtype.

    Args:
        actual: what was computed; None is a gradient that was not.
        expected: the oracle's.
        due: the gradients that were asked for.

    Returns:
        A finding for each gradient there is, in their order. One that is due and not there is infinitely far off.
    """
    findings = []
    for name, got in actual._asdict().items():
        want = getattr(expected, name)
        if got is None and name in due:
            findings.append(Finding(name, math.inf, 0.0, False))
        if got is None or want is None:
            continue
        allowed = TOLERANCES[got.dtype].rtol * want.abs() + SUM_ERROR * expected.magnitudes[name]
        allowed = allowed + _subnormal_step(got.dtype) / 2
        if name == "dweight" and expected.open is not None:
            allowed = allowed + expected.open
        error = (got.double() - want).abs()
        ok = got.shape == want.shape and bool((error <= allowed).all())
        findings.append(Finding(name, _worst(error), _worst(allowed), ok))
    return findings


def _scale_tolerance(dtype: torch.dtype) -> Tolerance:
    return Tolerance(_subnormal_step(dtype), max(torch.finfo(dtype).eps, 1e-5))


def _subnormal_step(dtype: torch.dtype) -> float:
    # A subnormal fp16 number has a unit in the last place of 2**-24 whatever its value.
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _close(name: str, actual: torch.Tensor, expected: torch.Tensor, either: torch.Tensor | float) -> Finding:
    tolerance = _tolerance(name, expected.dtype)
    got, want = actual.double(), expected.double()
    finite = want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    allowed = torch.where(finite, tolerance.atol + tolerance.rtol * want.abs() + either, 0.0)
    ok = bool((error <= allowed).all()) and bool((got.isfinite() == finite).all())
    return Finding(name, _worst(error), tolerance.atol + tolerance.rtol * _worst(want[finite].abs()), ok)


def _quantised(actual: LayerNormOutput, expected: ReferenceOutput, rounding: Rounding) -> Finding:
    if expected.y_scale is None or expected.terms is None:
        return Finding("y", math.inf, 1.0, ok=False)
    if actual.y_scale is None or actual.y_scale.shape != expected.y_scale.shape:
        return Finding("y", math.inf, 1.0, ok=False)
    out = DTYPES[expected.y.dtype]
    # Rows without a finite scale hold no values to compare; y_scale's own finding covers them.
    finite = expected.y_scale.isfinite()
    scale = actual.y_scale[finite].to(expected.z.dtype).unsqueeze(-1)
    ratio, error = expected.z[finite] / scale, VALUE_ERROR * expected.terms[finite] / scale
    slack: torch.Tensor | float = QUANTISATION_SLACK * out.qmax
    if expected.open is not None:
        slack = slack + expected.open[finite] / scale
    got, low, least, most, high = (
        _steps(q)
        for q in (
            actual.y[finite],
            quantise(ratio - slack, out, rounding),
            quantise(ratio - error, out, rounding),
            quantise(ratio + error, out, rounding),
            quantise(ratio + slack, out, rounding),
        )
    )
    steps = _worst(torch.maximum(least - got, got - most).clamp_min(0))
    return Finding("y", steps, 1.0, steps <= 1 and bool(((low <= got) & (got <= high)).all()))


def _steps(q: torch.Tensor) -> torch.Tensor:
    """Return the rank of each value among its quantised type's: adjacent values differ by 1, -0 is 0, NaN is far."""
    if q.dtype == torch.int8:
        return q.to(torch.int32)
    if q.dtype == torch.uint8:
        # The codes of fp4, one a byte.
        return torch.where(q >= 8, 8 - q.to(torch.int32), q.to(torch.int32))
    code = q.view(torch.uint8).to(torch.int32)
    return torch.where(q.float().isnan(), 1 << 15, torch.where(code >= 128, 128 - code, code))


def unequal(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how many elements are not equal."""
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return float((~same).sum())


def _outside(actual: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> float:
    within = ((least <= actual) & (actual <= most)) | (actual.isnan() & least.isnan())
    return float((~within).sum())


def _worst(error: torch.Tensor) -> float:
    return float(error.max()) if error.numel() else 0.0

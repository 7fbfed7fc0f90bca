"""How far a kernel's outputs may be from the oracle's, and whether they are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .codegen.model import Rounding
from .dtypes import DTYPES
from .output import LayerNormOutput
from .reference import ReferenceOutput, quantise


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


def compare(
    actual: LayerNormOutput, expected: ReferenceOutput, rounding: Rounding = Rounding.NEAREST
) -> list[Finding]:
    """Hold every output of a call against the oracle's.

    Floats are held to `TOLERANCES` of their dtype. `residual_out` must be equal to the bit. Quantised values are
    held to the scale that was stored: each must be at most one step from, and the rounding of a value within
    `QUANTISATION_SLACK` of, z / y_scale. A row whose oracle is not finite must not be finite either.

    Returns:
        A finding for each output there is, in the order of `LayerNormOutput`; `error` is in units of the
        output (steps for quantised ones, differing elements for residual_out).
    """
    findings = []
    if expected.y_scale is None:
        findings.append(_close("y", actual.y, expected.y, TOLERANCES[expected.y.dtype]))
    else:
        findings.append(_quantised(actual, expected, rounding))
    if expected.residual_out is not None:
        differing = _differing(actual.residual_out, expected.residual_out)
        findings.append(Finding("residual_out", differing, 0.0, differing == 0))
    if expected.y_scale is not None:
        findings.append(_close("y_scale", actual.y_scale, expected.y_scale, _scale_tolerance(expected.y_scale.dtype)))
    if expected.mean is not None:
        findings.append(_close("mean", actual.mean, expected.mean, STATISTICS))
    if expected.rstd is not None:
        findings.append(_close("rstd", actual.rstd, expected.rstd, STATISTICS))
    return findings


def _scale_tolerance(dtype: torch.dtype) -> Tolerance:
    # fp16 scales may be subnormal, where one unit in the last place is 2**-24.
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return Tolerance(smallest, max(torch.finfo(dtype).eps, 1e-5))


def _close(name: str, actual: torch.Tensor | None, expected: torch.Tensor, tolerance: Tolerance) -> Finding:
    if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Finding(name, float("inf"), tolerance.atol, False)
    got, want = actual.double(), expected.double()
    finite = want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    allowed = torch.where(finite, tolerance.atol + tolerance.rtol * want.abs(), 0.0)
    ok = bool((error <= allowed).all()) and bool((got.isfinite() == finite).all())
    return Finding(name, _worst(error), tolerance.atol + tolerance.rtol * _worst(want[finite].abs()), ok)


def _quantised(actual: LayerNormOutput, expected: ReferenceOutput, rounding: Rounding) -> Finding:
    if actual.y.dtype != expected.y.dtype or actual.y.shape != expected.y.shape or actual.y_scale is None:
        return Finding("y", float("inf"), 1.0, False)
    out = DTYPES[expected.y.dtype]
    # Rows without a finite scale hold no values to compare; y_scale's own finding covers them.
    finite = expected.y_scale.isfinite() if expected.y_scale is not None else None
    ratio = expected.z[finite] / actual.y_scale[finite].to(expected.z.dtype).unsqueeze(-1)
    slack = QUANTISATION_SLACK * out.qmax
    got, low, best, high = (
        _steps(q)
        for q in (
            actual.y[finite],
            quantise(ratio - slack, out, rounding),
            quantise(ratio, out, rounding),
            quantise(ratio + slack, out, rounding),
        )
    )
    error = _worst((got - best).abs())
    return Finding("y", error, 1.0, error <= 1 and bool(((low <= got) & (got <= high)).all()))


def _steps(q: torch.Tensor) -> torch.Tensor:
    """Number the values of a quantised type in ascending order, so that neighbours differ by 1 (and -0 is 0)."""
    if q.dtype == torch.int8:
        return q.to(torch.int32)
    code = q.view(torch.uint8).to(torch.int32)
    return torch.where(code >= 128, 128 - code, code)


def _differing(actual: torch.Tensor | None, expected: torch.Tensor) -> float:
    if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return float((~same).sum())


def _worst(error: torch.Tensor) -> float:
    return float(error.max()) if error.numel() else 0.0

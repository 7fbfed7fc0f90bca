"""The oracle of norms quantised as inference engines have it, in plain torch; see `quantised_layer_norm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ..codegen.values import FusedAdd, FusedQuant, Norm, ScaleFormat, ScaleGroup
from ..dtypes import DTYPES, word
from .modulated import modulated
from .norms import PLAIN, Oracle, ReferenceOutput, quantise, stored_scale
from .renormed import renormed


class ReferenceQuantised(NamedTuple):
    """The results of a call, with scales as fp64 numbers, and the bounds of their errors.

    Attributes:
        y: quantised by `scale`.
        rows: the norm alone: y in x's dtype, how far off that may be, the stored sum if there is one, and the
            statistics.
        scale: of each element, x's shape.
        z: what is divided by the scale.
        amax: the largest |z| of each group, (..., G), what is above a bound cut off.
        open: how far off z may be, because fp32 leaves open which way something is rounded before.
        terms: see `ReferenceOutput`; of z.
        size: neighbours that share a scale.
        kind: what scales are stored as.
        global_scale: what scales stand under, if they do.
    """

    y: torch.Tensor
    rows: ReferenceOutput
    scale: torch.Tensor
    z: torch.Tensor
    amax: torch.Tensor
    open: torch.Tensor
    terms: torch.Tensor
    size: int
    kind: ScaleFormat
    global_scale: torch.Tensor | None = None

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat a value per group to one per element."""
        return values.repeat_interleave(self.size, -1)[..., : self.z.shape[-1]]

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value of each group; no value is negative."""
        return _in_groups(values, self.size).amax(-1)


# The operands of a second norm, and the sum as the call stored it.
_OF_TWO = ("next_weight", "next_bias", "stored")
# The largest number of scales in e4m3, and what leaves nothing of any value that is divided by it.
E4M3_MAX = 448.0
VANISHING = 2.0**1000

# How far off fp32's z may be, in units of what its terms add up to without their signs: four roundings. Where terms
# cancel, that is several of e5m2's steps, the finest of which is 2**-32 of a row's largest value.
VALUE_ERROR = 2.0**-22


def quantised_by(norm: Oracle, x: torch.Tensor, weight: torch.Tensor | None = None, **asked: Any) -> ReferenceQuantised:
    """Compute in fp64 what a norm's quantised function should return, given the operator's arguments."""
    names = ("bias", "eps", "weight_offset", "x_bias", "cast", "residual", "scale", "shift", "gate")
    passed = {name: asked[name] for name in (*names, *_OF_TWO) if asked.get(name) is not None}
    fadd, rounded = word(FusedAdd, "fadd", asked.get("fadd", "pre_add_store")), x
    if "scale" in passed:
        norm = partial(modulated, norm)
    elif "residual" in passed and fadd.renorms:
        norm, rounded = partial(renormed, norm), passed["residual"]
    elif "residual" in passed:
        passed["fadd"] = fadd
    # Rows that are rounded first are rounded to the 16 bits of what is normalised: y has fewer.
    rows = norm(x, weight=weight, **passed, out_dtype=rounded.dtype, save_mv=True)
    assert rows.terms is not None
    z, terms = rows.z, rows.terms
    unsure = torch.zeros_like(z) if rows.open is None else rows.open
    if asked.get("quantise_rounded"):
        error = VALUE_ERROR * terms + unsure
        nearest = z.to(x.dtype).double()
        unsure = torch.maximum((z + error).to(x.dtype).double() - nearest, nearest - (z - error).to(x.dtype).double())
        z = nearest
    if asked.get("smooth_scale") is not None:
        smooth = asked["smooth_scale"].double()
        z, terms, unsure = z * smooth, terms * smooth.abs(), unsure * smooth.abs()
    out, kind = DTYPES[asked.get("out_dtype") or torch.int8], word(ScaleFormat, "", asked.get("scale_format", "float"))
    size = word(ScaleGroup, "group_size", asked.get("group_size", "none")).code or z.shape[-1]
    amax = _in_groups(z.abs(), size).amax(-1)
    if asked.get("scale_ub") is not None:
        amax = torch.minimum(amax, asked["scale_ub"].double().clamp(min=0.0))
    above = asked.get("global_scale")
    scale = scale_of(amax, out.qmax, kind, above).repeat_interleave(size, -1)[..., : z.shape[-1]]
    if word(FusedQuant, "fquant", asked.get("fquant", "dynamic")).is_static:
        static = asked["column_scale"] if asked.get("static_scale") is None else asked["static_scale"]
        scale = static.double().expand(z.shape)
    y = quantise(z / scale, out)
    return ReferenceQuantised(
        packed(y) if out.is_fp4 else y,
        rows._replace(y=rows.z.to(x.dtype)),
        scale,
        z,
        amax,
        unsure,
        terms,
        size,
        kind,
        above,
    )


FORWARD: Mapping[Norm, Callable[..., ReferenceQuantised]] = {
    norm: partial(quantised_by, plain) for norm, plain in PLAIN.items()
}


def columnwise(rows: ReferenceQuantised, size: int) -> ReferenceQuantised:
    """Return what y should be along columns: of the transposed rows, in groups of `size` neighbours."""
    z, terms, unsure = (each.reshape(-1, rows.z.shape[-1]).t() for each in (rows.z, rows.terms, rows.open))
    turned = rows._replace(z=z, open=unsure, terms=terms, size=size)
    amax, out = turned.largest(z.abs()), DTYPES[rows.y.dtype]
    scale = turned.spread(scale_of(amax, out.qmax, rows.kind))
    return turned._replace(y=quantise(z / scale, out), scale=scale, amax=amax)


def _in_groups(values: torch.Tensor, size: int) -> torch.Tensor:
    """Values with a last dimension of neighbours, zeros behind the last."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size))
    return padded.reshape(*values.shape[:-1], -1, size)


def scale_of(
    amax: torch.Tensor, qmax: float, kind: ScaleFormat, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the scales of maxima, in fp32 and as stored; under a global scale, as `under` returns them."""
    if global_scale is not None:
        stored = (amax / qmax * global_scale.double()).clamp(max=E4M3_MAX).float().to(torch.float8_e4m3fn)
        return under(global_scale, torch.where(amax.isfinite(), stored.double(), torch.nan))
    scale = stored_scale(amax, qmax).double()
    return next_power_of_two(scale) if kind.rounds_up else scale


def under(global_scale: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the divisor of values whose scale stands under a global scale: `VANISHING` where the scale is 0."""
    return torch.where(scale == 0, VANISHING, scale.double() / global_scale.double())


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes of fp4, one a byte, as torch has them: the first of two neighbours in a byte's lower half."""
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).view(torch.float4_e2m1fn_x2)


def unpacked(y: torch.Tensor) -> torch.Tensor:
    """Undo `packed`."""
    both = y.view(torch.uint8)
    return torch.stack((both & 15, both >> 4), -1).flatten(-2)


def unswizzled(scale: torch.Tensor, m: int, groups: int) -> torch.Tensor:
    """Return scales in tiles of 128 rows by 4 groups as (m, groups); see `quantised_layer_norm`.

    By where each is, rather than by moving dimensions, as torch's own tests swizzle them.
    """
    tiles = -(-groups // 4)
    row, group = torch.arange(m)[:, None], torch.arange(groups)[None, :]
    place = 512 * (row // 128 * tiles + group // 4) + 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4
    return scale.flatten()[place.to(scale.device)]


def next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that is not below a scale; NaN if the scale is not finite."""
    return torch.where(scale.isfinite(), torch.exp2(scale.log2().ceil()), torch.nan)

"""The oracle of two norms with an add between them, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..codegen.values import Cast, FusedQuant, Norm
from ..dtypes import DTYPES, word
from .norms import PLAIN, Oracle, ReferenceOutput

# How far off the sum may be in fp32, beside 1 and beside its values.
_ERROR = 1e-5


def _renormed(
    norm: Oracle,
    x: torch.Tensor,
    residual: torch.Tensor,
    *vectors: torch.Tensor | None,
    stored: torch.Tensor | None = None,
    fquant: str | int | FusedQuant = "none",
    smooth_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cast: str | Cast = "after_weight",
    **others: Any,
) -> ReferenceOutput:
    """Compute what the kernel of two norms should return: the second is that of the stored sum.

    Args:
        norm: the oracle of each norm.
        x: as in the call.
        residual: as in the call.
        vectors: weight and bias of the first norm, and of the second one; weights alone of a norm without a bias.
        stored: the sum as the call stored it, which may be any that `sums` allows; None for the nearest.
        fquant: as in the call.
        smooth_scale: as in the call.
        out_dtype: as in the call.
        cast: as in the call.
        others: the other arguments of either norm.
    """
    y_dtype = out_dtype or (torch.int8 if word(FusedQuant, "fquant", fquant).quantises else x.dtype)
    others["cast"] = word(Cast, "cast", cast).of(DTYPES[y_dtype], DTYPES[x.dtype])
    middle = len(vectors) // 2
    first = norm(x, *vectors[:middle], residual=residual, fadd="post_add", **others)
    error = _ERROR * (1 + first.z.abs()) + (0.0 if first.open is None else first.open)
    total = first.y if stored is None else stored
    options = {"fquant": fquant, "smooth_scale": smooth_scale, "out_dtype": y_dtype, **others}
    second = norm(total, *vectors[middle:], **options)
    least, most = ((first.z + sign * error).to(residual.dtype) for sign in (-1, 1))
    both: dict[str, Any] = {
        name: None if one is None else torch.stack((one, getattr(second, name)), -1)
        for name, one in (("mean", first.mean), ("rstd", first.rstd))
    }
    return second._replace(residual_out=total, sums=(least, most), **both)


def _by_name(norm: Norm, x: torch.Tensor, residual: torch.Tensor, **named: Any) -> ReferenceOutput:
    vectors = [named.pop(name, None) for name in ("weight", "bias", "next_weight", "next_bias")]
    return _renormed(PLAIN[norm], x, residual, *vectors[:: 1 if norm.centres else 2], **named)


FORWARD: Mapping[Norm, Oracle] = {norm: partial(_by_name, norm) for norm in PLAIN}

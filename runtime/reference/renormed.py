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


def renormed(
    norm: Oracle,
    x: torch.Tensor,
    residual: torch.Tensor,
    *,
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
        stored: the sum as the call stored it, which may be any that `sums` allows; None for the nearest.
        fquant: as in the call.
        smooth_scale: as in the call.
        out_dtype: as in the call.
        cast: as in the call.
        others: the other arguments of either norm, and weight, bias, next_weight and next_bias as in the call.
    """
    first_vectors, next_vectors = (
        {name: others.pop(f"{which}{name}") for name in ("weight", "bias") if f"{which}{name}" in others}
        for which in ("", "next_")
    )
    y_dtype = out_dtype or (torch.int8 if word(FusedQuant, "fquant", fquant).quantises else x.dtype)
    others["cast"] = word(Cast, "cast", cast).of(DTYPES[y_dtype], DTYPES[x.dtype])
    first = norm(x, **first_vectors, residual=residual, fadd="post_add", **others)
    error = _ERROR * (1 + first.z.abs()) + (0.0 if first.open is None else first.open)
    # An infinite sum is known.
    error = error.nan_to_num(posinf=0.0)
    total = first.y if stored is None else stored
    options = {"fquant": fquant, "smooth_scale": smooth_scale, "out_dtype": y_dtype, **others}
    second = norm(total, **next_vectors, **options)
    least, most = ((first.z + sign * error).to(residual.dtype) for sign in (-1, 1))
    both: dict[str, Any] = {
        name: None if one is None else torch.stack((one, getattr(second, name)), -1)
        for name, one in (("mean", first.mean), ("rstd", first.rstd))
    }
    return second._replace(residual_out=total, sums=(least, most), **both)


FORWARD: Mapping[Norm, Oracle] = {norm: partial(renormed, plain) for norm, plain in PLAIN.items()}

"""The oracle of gated norms, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..codegen.values import FusedQuant, GateActivation, Gating, Norm
from ..dtypes import word
from .gradients import ReferenceGradients
from .norms import PLAIN, Oracle, ReferenceOutput


def _gated(
    norm: Oracle,
    x: torch.Tensor,
    gate: torch.Tensor,
    *,
    gating: str | Gating = "after_norm",
    activation: str | GateActivation = "silu",
    fquant: str | int | FusedQuant = "none",
    out_dtype: torch.dtype | None = None,
    **others: Any,
) -> ReferenceOutput:
    """Compute in fp64 what the kernel of a norm's gated function should return (Dao and Gu, 2024).

    Of groups of columns x is (..., G, N), and weight and bias may be (G, N). Other arguments are those of the family.
    """
    z = gate.double()
    factor = 1 / (1 + (-z).exp())
    if word(GateActivation, "activation", activation) is GateActivation.SILU:
        factor = z * factor
    quantises = word(FusedQuant, "fquant", fquant).quantises
    out_dtype = out_dtype or (torch.int8 if quantises else x.dtype)
    if word(Gating, "gating", gating).is_before:
        return norm(x.double() * factor, fquant=fquant, out_dtype=out_dtype, **others)
    if quantises:
        # The gate multiplies between the norm and the quantisation, as a smooth scale does.
        return norm(x, fquant="smooth_dynamic", smooth_scale=factor, out_dtype=out_dtype, **others)
    rows = norm(x, **others)
    return rows._replace(y=(rows.z * factor).to(out_dtype), z=rows.z * factor)


FORWARD: Mapping[Norm, Oracle] = {norm: partial(_gated, plain) for norm, plain in PLAIN.items()}


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gating: str | Gating = "after_norm",
    activation: str | GateActivation = "silu",
    eps: float,
) -> ReferenceGradients:
    """Every gradient of a gated norm, LayerNorm's where there is a bias, by autograd in fp64."""
    rows = [tensor.double().requires_grad_() for tensor in (x, gate)]
    vectors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    leaves = {name: vector.double().requires_grad_() for name, vector in vectors.items()}
    norm = FORWARD[Norm.RMS if bias is None else Norm.LAYER]
    options: dict[str, Any] = {"gating": gating, "activation": activation, "eps": eps}
    d = dy.double()
    dx, dgate, *sums = torch.autograd.grad(norm(rows[0], rows[1], **leaves, **options).z, (*rows, *leaves.values()), d)
    magnitudes = {
        name: gradient.abs() + gradient.abs().mean(-1, keepdim=True)
        for name, gradient in (("dx", dx), ("dgate", dgate))
    }
    # Whatever signs the rows' shares have.
    ones = {name: torch.ones_like(vector) for name, vector in leaves.items()}
    with torch.no_grad():
        whole = norm(rows[0], rows[1], **ones, **options).z.abs() + 1
    magnitudes |= {f"d{name}": (d.abs() * whole).sum_to_size(vector.shape) for name, vector in leaves.items()}
    return ReferenceGradients(dx, sums[0], sums[1] if bias is not None else None, magnitudes, dgate=dgate)

"""The oracle of modulated norms, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..codegen.values import FusedQuant, Norm
from ..dtypes import word
from .gradients import ReferenceGradients, backward
from .norms import PLAIN, Oracle, ReferenceOutput, quantised_rows


def _of_each_row(operand: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Repeat a modulation to one row per row of x."""
    leading = (len(operand), *[1] * (x.dim() - 2)) if operand.dim() == 2 else operand.shape[:-1]
    return operand.double().view(*leading, x.shape[-1]).expand(x.shape)


def modulated(
    norm: Oracle,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    fquant: str | int | FusedQuant = "none",
    out_dtype: torch.dtype | None = None,
    **others: Any,
) -> ReferenceOutput:
    """Compute in fp64 what the kernel of a norm's modulated function should return (Peebles and Xie, 2022).

    Other arguments are those of the family. Statistics are returned as by `layernorm2d_fwd`.
    """
    s = x.double() if gate is None else x.double() * _of_each_row(gate, x)
    residual_out, sums = None, None
    if residual is not None:
        # On fp32 operands a fused multiply-add rounds once; a multiplication and an addition round twice.
        error = 2.0**-23 * ((s + residual.double()).abs() + s.abs())
        s = s + residual.double()
        residual_out, sums = s.to(residual.dtype), ((s - error).to(residual.dtype), (s + error).to(residual.dtype))
        s = residual_out.double()
    rows = norm(s, **others)
    assert rows.terms is not None
    factor, added = 1 + _of_each_row(scale, x), _of_each_row(shift, x)
    z = rows.z * factor + added
    y_scale = None
    if word(FusedQuant, "fquant", fquant).quantises:
        y, y_scale = quantised_rows(z, out_dtype or torch.int8)
    else:
        y = z.to(out_dtype or x.dtype)
    terms = rows.terms * factor.abs() + added.abs()
    return rows._replace(y=y, residual_out=residual_out, y_scale=y_scale, z=z, sums=sums, terms=terms)


FORWARD: Mapping[Norm, Oracle] = {norm: partial(modulated, plain) for norm, plain in PLAIN.items()}


def gradients(
    dy: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    gate: torch.Tensor | None = None,
    gated: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor,
    dresidual_out: torch.Tensor | None = None,
) -> ReferenceGradients:
    """Compute every gradient of a modulated norm, LayerNorm's where there is a mean, from what its call returned.

    The norm's are those of `layernorm2d_bwd` and `rmsnorm2d_bwd`, with dy * (1 + scale) in dy's place.

    Args:
        dy: the gradient of y.
        rows: what was normalised: x, or residual_out.
        scale: as in the forward call.
        shift: as in the forward call.
        gate: as in the forward call.
        gated: x, where there is a gate.
        weight: as in the forward call.
        bias: as in the forward call.
        mean: of each row.
        rstd: of each row.
        dresidual_out: the gradient of residual_out.
    """
    d, h = dy.double(), rows.double()
    dz = d * (1 + _of_each_row(scale, rows))
    norm = backward(dz, rows, weight, mean=mean, rstd=rstd, dresidual_out=dresidual_out)
    h = (h if mean is None else h - mean.double().unsqueeze(-1)) * rstd.double().unsqueeze(-1)
    affine, of_affine = (h, h.abs()) if weight is None else (h * weight.double(), (h * weight.double()).abs())
    if bias is not None:
        affine, of_affine = affine + bias.double(), of_affine + bias.double().abs()
    ds, of_ds = norm.dx, norm.magnitudes["dx"]
    dx, of_dx = ds, of_ds
    sums = {"dscale": (d * affine, d.abs() * of_affine, scale), "dshift": (d, d.abs(), shift)}
    if gate is not None and gated is not None:
        factor, x = _of_each_row(gate, rows), gated.double()
        dx, of_dx = ds * factor, of_ds * factor.abs()
        sums["dgate"] = (ds * x, of_ds * x.abs(), gate)
    grads = {name: _shared(each, operand) for name, (each, _, operand) in sums.items()}
    magnitudes = {name: _shared(each, operand) for name, (_, each, operand) in sums.items()}
    magnitudes |= {"dx": of_dx, "dresidual": of_ds}
    return norm._replace(dx=dx, dresidual=ds, magnitudes=norm.magnitudes | magnitudes, **grads)


def _shared(rows: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """Sum the rows that share a row of an operand, in the operand's shape."""
    if operand.shape == rows.shape:
        return rows
    own = operand.dim() - 1
    return rows.flatten(own, -2).sum(own)

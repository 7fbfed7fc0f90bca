"""The expected results of a case: normforge's reference in fp64, some rows at a time, or a family's formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from normforge import reference
from normforge.dtypes import DTYPES

from .. import cases
from ..accuracy.units import statistics
from .calls import LEAVES, Tensors, family, forward, laid_out
from .case import Case, Norm

# The reference holds some ten fp64 copies of what it is given.
_AT_ONCE = 1 << 23

# Results that are sums over rows.
SUMMED = ("dweight", "dbias")
# Results with one value per row.
PER_ROW = ("y_scale", "mean", "rstd")


@dataclass(frozen=True)
class Want:
    """Expected values.

    Attributes:
        value: fp64.
        open: how far off a value may be because fp32 leaves open which way a row is rounded before the weight.
        terms: what the terms of a gradient add up to without their signs.
    """

    value: torch.Tensor
    open: torch.Tensor | float = 0.0
    terms: torch.Tensor | float = 0.0

    def plus(self, other: Want | None) -> Want:
        """Return the sum of two parts."""
        if other is None:
            return self
        return Want(self.value + other.value, self.open + other.open, self.terms + other.terms)


def rows_of(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """Return a tensor of x's shape as (M, n)."""
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor.view(-1, n)


def blocks(case: Case) -> Iterator[slice]:
    """Yield every row of a case, some at a time; all at once if a formula computes them."""
    step = max(1, case.rows if case.is_beside else _AT_ONCE // case.n)
    for start in range(0, case.rows, step):
        yield slice(start, start + step)


def expected(case: Case, given: Tensors, got: Tensors, part: slice) -> dict[str, Want]:
    """Return the expected results of some rows; of a dropout, `got` says which elements were kept."""
    if case.is_beside:
        return _by_formula(case, given, got)
    names = ("x", "residual", "dy", "dresidual_out")
    rows = {name: rows_of(given[name], case.n)[part] for name in names if name in given}
    of = forward(case, given | rows, reference)
    either = 0.0 if of.open is None else of.open
    found = {"y": Want(of.z, either)}
    if of.y_scale is not None:
        low, amax, high = ((of.z.abs() + shift * either).amax(-1) for shift in (-1, 0, 1))
        apart = torch.maximum(high - amax, amax - low) / DTYPES[case.y].qmax
        found["y_scale"] = Want(of.y_scale.double(), apart)
    for name in ("residual_out", "mean", "rstd"):
        tensor = getattr(of, name)
        if tensor is not None:
            found[name] = Want(tensor.double())
    if case.arriving:
        found |= _gradients(case, given, rows, rows["x"] if of.residual_out is None else of.residual_out)
    return found


def _gradients(case: Case, given: Tensors, rows: Tensors, normalised: torch.Tensor) -> dict[str, Want]:
    s, dy = normalised.double(), rows.get("dy", torch.zeros_like(rows["x"]))
    mean, rstd = (each.squeeze(-1) for each in statistics(s, case.eps, centres=case.norm is Norm.LAYER))
    more: dict[str, Any] = {"rstd": rstd, "dresidual_out": rows.get("dresidual_out"), "cast": case.cast}
    more |= {"mean": mean} if case.norm is Norm.LAYER else {"weight_offset": case.weight_offset}
    of = getattr(reference, f"{case.norm.word}norm2d_bwd")(dy, normalised, given.get("weight"), **more)
    dx = Want(of.dx, terms=of.magnitudes["dx"])
    # h is the difference of s and a mean, each rounded: what it may be off by does not shrink with it.
    apart = (dy.double().abs() * (1 + mean.abs() * rstd).unsqueeze(-1)).sum(0)
    either = 0.0 if of.open is None else of.open
    found = {"dx": dx, "dresidual": dx, "dweight": Want(of.dweight, either, of.magnitudes["dweight"] + apart)}
    return found if of.dbias is None else found | {"dbias": Want(of.dbias, terms=of.magnitudes["dbias"])}


def _by_formula(case: Case, given: Tensors, got: Tensors) -> dict[str, Want]:
    """Return the results of a gated norm, GroupNorm or a norm behind a dropout, with gradients by autograd."""
    leaves = cases.doubled({name: given[name] for name in LEAVES if name in given})
    operands = {name: leaf for name, leaf in leaves.items() if name != "residual"}
    operands["x"] = _added(case, given, leaves, got["keep"]) if case.dropout_p else laid_out(case, leaves["x"])
    (y,) = cases.formula(family(case), operands)
    y = y.reshape(case.shape)
    gradients = cases.gradients([y], leaves, [given["dy"].double()])
    return {"y": Want(y.detach())} | {f"d{name}": Want(gradient) for name, gradient in gradients.items()}


def _added(case: Case, given: Tensors, leaves: Tensors, keep: torch.Tensor) -> torch.Tensor:
    """Return the sum as it is returned, which is defined in fp32; autograd sees no rounding.

    The factor is rounded to fp32, and so is the product by itself.
    """
    factor = 1 / (1 - torch.tensor(case.dropout_p))
    total = torch.where(keep, leaves["x"] * factor.double(), 0.0) + leaves["residual"]
    stored = torch.where(keep, given["x"].float() * factor, 0.0) + given["residual"].float()
    return total + (stored.to(case.residual).double() - total).detach()

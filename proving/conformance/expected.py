"""The expected results of a case: normforge's reference in fp64, some rows at a time, or a family's formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from normforge import reference
from normforge.dtypes import DTYPES
from normforge.random_mask import dropout_mask

from .. import cases
from ..accuracy.units import statistics
from ..cases import Tensors
from .calls import LEAVES, backward, forward, recorded
from .case import Case

# The reference holds some ten fp64 copies of what it is given.
_AT_ONCE = 1 << 23

# Results that are sums over rows.
SUMMED = ("dweight", "dbias", "dnext_weight", "dnext_bias")
# Results with one value per row.
PER_ROW = ("y_scale", "mean", "rstd")


class Want(NamedTuple):
    """Expected values.

    Attributes:
        value: fp64.
        open: how far off a value may be because fp32 leaves open which way a row is rounded before the weight.
        terms: what the terms of a gradient add up to without their signs.
    """

    value: torch.Tensor
    open: torch.Tensor | float = 0.0
    terms: torch.Tensor | float = 0.0


def rows_of(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """Return a tensor of x's shape as (M, n)."""
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor.view(-1, n)


def blocks(case: Case) -> Iterator[slice]:
    """Yield every row of a case, some at a time; all at once if a formula computes them."""
    step = max(1, case.rows if case.is_beside else _AT_ONCE // case.n)
    for start in range(0, case.rows, step):
        yield slice(start, start + step)


def expected(case: Case, given: Tensors, part: slice) -> dict[str, Want]:
    """Return the expected results of some rows."""
    if case.family != "plain":
        return _by_formula(case, given)
    names = ("x", "residual", "dy", "dresidual_out")
    rows = {name: rows_of(given[name], case.n)[part] for name in names if name in given}
    mask: dict[str, Any] = {}
    if case.dropout_p:
        mask = {"dropout_p": case.dropout_p, "dropout_rng": cases.SIGNED_RNG.to(rows["x"].device)}
    of = forward(case, given | rows, reference, **mask)
    either = 0.0 if of.open is None else of.open
    found = {"y": Want(of.z, either)}
    if of.y_scale is not None:
        low, amax, high = ((of.z.abs() + shift * either).amax(-1) for shift in (-1, 0, 1))
        apart = torch.maximum(high - amax, amax - low) / DTYPES[case.y].qmax
        found["y_scale"] = Want(of.y_scale.double(), apart)
    saved = {"residual_out": of.residual_out, "mean": of.mean, "rstd": of.rstd}
    found |= {name: Want(tensor.double()) for name, tensor in saved.items() if tensor is not None}
    if mask:
        found["keep"] = Want(dropout_mask(rows["x"].shape, **mask).double())
    if case.arriving:
        normalised = rows["x"] if of.residual_out is None else of.residual_out
        found |= _gradients(case, given | {"dy": torch.zeros_like(rows["x"])} | rows | {"x": normalised}, mask)
    return found


def _gradients(case: Case, given: Tensors, mask: dict[str, Any]) -> dict[str, Want]:
    """Return the gradients by fp64's statistics of the rows that were normalised, `x`."""
    mean, rstd = (each.squeeze(-1) for each in statistics(given["x"], case.eps, centres=case.norm.centres))
    of = backward(case, given, mean, reference, rstd=rstd, dresidual_out=given.get("dresidual_out"), **mask)
    # h is the difference of s and a mean, each rounded: what it may be off by does not shrink with it.
    apart = (given["dy"].double().abs() * (1 + mean.abs() * rstd).unsqueeze(-1)).sum(0)
    either, of_x = 0.0 if of.open is None else of.open, "ddropped" if mask else "dx"
    found = {
        "dx": Want(getattr(of, of_x), terms=of.magnitudes[of_x]),
        "dresidual": Want(of.dx, terms=of.magnitudes["dx"]),
        "dweight": Want(of.dweight, either, of.magnitudes["dweight"] + apart),
    }
    return found if of.dbias is None else found | {"dbias": Want(of.dbias, terms=of.magnitudes["dbias"])}


def _by_formula(case: Case, given: Tensors) -> dict[str, Want]:
    """Return the results of another family's call, with gradients by autograd."""
    leaves = cases.doubled({name: given[name] for name in LEAVES if name in given})
    return {name: Want(each) for name, each in recorded(case, given, leaves, cases.formula).items()}

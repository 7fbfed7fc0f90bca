"""The fp64 oracle that a provider's outputs are compared with before timing.

Peers round in places of their own (Liger's RMSNorm before the weight, torch's add before the norm), so the tolerances
are those of a usable result; the test suite holds normforge itself to tighter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from .cells import Cell, Fp8Cell, QuantisedCell, Task
from .expressions import expression
from .inputs import DROPOUT_P, QMAX, Inputs, chunks

# Relative to each value, and to the root mean square of its tensor: about two roundings of the dtype.
TOLERANCES = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-4}

# One step of int8, and of fp8_e4m3fn the distance of neighbours: an eighth of the value, 2**-9 near zero.
_STEPS = {torch.int8: (0.0, 1.1), torch.float8_e4m3fn: (0.13, 2.0**-9)}


class WrongOutputError(Exception):
    """A provider computed something else than was asked."""


def expect(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Every output of the cell's task, by its family's formula in fp64: values in fp32, y before it is quantised."""
    cell, x, found = inputs.cell, inputs.x, dict[str, torch.Tensor]()
    if inputs.x_scale is not None:
        x = x.float() * inputs.x_scale
    if cell.task.adds and inputs.residual is not None:
        # The norm is of the sum as it is stored.
        x = (x.float() + inputs.residual.float()).to(inputs.residual.dtype)
        found["residual_out"] = x.float()
    found |= _differentiated(replace(inputs, x=x))
    if isinstance(cell, QuantisedCell) and cell.unquantised:
        found["unquantised"] = found["y"]
    return found


def _differentiated(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return y, and the sum of a gated branch, or the gradients of operands; some rows at a time."""
    differentiates = inputs.dy is not None
    operands, given = inputs.operands(), inputs.of_outputs()
    vectors = {name: operand.double() for name, operand in operands.items() if operand.dim() == 1}
    rows: dict[str, list[torch.Tensor]] = {}
    sums = {name: torch.zeros_like(vector) for name, vector in vectors.items() if differentiates}
    for some in chunks(inputs.x):
        leaves = {name: vectors[name] if name in vectors else each[some].double() for name, each in operands.items()}
        for leaf in leaves.values():
            leaf.requires_grad_(differentiates)
        outputs = _formula(replace(inputs, tables=tuple(table[some] for table in inputs.tables)))(leaves)
        made = dict(zip(("y", "residual_out"), outputs, strict=False))
        if differentiates:
            of = torch.autograd.grad(outputs, tuple(leaves.values()), [dy[some].double() for dy in given])
            made = dict(zip(leaves, of, strict=True))
        for name, tensor in made.items():
            if name in sums:
                sums[name] += tensor
            else:
                rows.setdefault(name, []).append(tensor.float())
    found = {name: torch.cat(parts) for name, parts in rows.items()} | {name: one.float() for name, one in sums.items()}
    return {f"d{name}": tensor for name, tensor in found.items()} if differentiates else found


def _formula(inputs: Inputs) -> Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]:
    """Return a cell's outputs but for the sum and the quantisation, which the oracle takes by itself."""
    cell = inputs.cell
    if type(cell) in (QuantisedCell, Fp8Cell) or cell.task.adds or cell.task.quantises:
        inputs = replace(inputs, cell=Cell(Task.FORWARD, cell.norm, cell.m, cell.n))

    def run(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        function, arguments = expression(inputs, tensors)
        made = function(*arguments)
        if inputs.smooth_scale is not None:
            made = made * inputs.smooth_scale
        return made if isinstance(made, tuple) else (made,)

    return run


def check(
    outputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    inputs: Inputs,
    allowances: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Hold outputs against the oracle's.

    Args:
        outputs: what a provider returned, by name; `y_scale` goes with a quantised y.
        expected: what `expect` returned.
        inputs: what both were computed from.
        allowances: by how many tolerances an output that is not quantised may be off, where that is not one.

    Raises:
        WrongOutputError: an output is missing, of another shape or dtype, or further off than its tolerance.
    """
    if inputs.cell.task is Task.DROP_ADD:
        expected = _of_the_mask(outputs, inputs)
    for name, want in expected.items():
        got = outputs.get(name)
        dtype = inputs.out_dtype if name == "y" else inputs.x.dtype
        if got is None or got.shape != want.shape or got.dtype != dtype:
            what = "missing" if got is None else f"{tuple(got.shape)} {got.dtype}"
            raise WrongOutputError(f"{name} is {what}, not {tuple(want.shape)} {dtype}")
        if name == "y" and inputs.cell.task.quantises:
            _check_quantised(got, outputs, want, inputs)
        else:
            _check_close(name, got, want, allowances.get(name, 1.0))


def _of_the_mask(outputs: Mapping[str, torch.Tensor], inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return what is expected for a provider's own mask: a sum without x where that sum is nearer than one with x."""
    got, residual = outputs.get("residual_out"), inputs.residual
    assert residual is not None
    if got is None or got.shape != residual.shape:
        raise WrongOutputError("residual_out is missing, or not of residual's shape")
    kept = inputs.x.float() / (1 - DROPOUT_P)
    mask = (got.float() - residual.float() - kept).abs() < (got.float() - residual.float()).abs()
    # Values near 0 are equally near to both, within five standard deviations.
    small = float((kept.abs() < 0.01).float().mean())
    rate = 1 - float(mask.float().mean())
    slack = small + 5 * (DROPOUT_P / mask.numel()) ** 0.5
    if abs(rate - DROPOUT_P) > slack:
        raise WrongOutputError(f"a share of {rate:.4f} is dropped, not {DROPOUT_P}")
    return expect(replace(inputs, x=kept * mask))


def _check_close(name: str, got: torch.Tensor, want: torch.Tensor, allowance: float) -> None:
    tolerance = TOLERANCES[got.dtype] * allowance
    floor = tolerance * want.square().mean().sqrt()
    _require(name, (got.float() - want).abs_(), tolerance * want.abs() + floor)


def _check_quantised(
    got: torch.Tensor, outputs: Mapping[str, torch.Tensor], want: torch.Tensor, inputs: Inputs
) -> None:
    qmax = QMAX[got.dtype]
    if inputs.y_scale is not None:
        scale = inputs.y_scale
        want = want.clamp(-qmax * scale, qmax * scale)
    else:
        columns = inputs.cell.group_columns if isinstance(inputs.cell, QuantisedCell) else want.shape[-1]
        got, want = (tensor.reshape(want.shape[0], -1, columns) for tensor in (got, want))
        scale = _scales(outputs, want.shape[:2], inputs).unsqueeze(-1)
        amax = want.abs().amax(-1, keepdim=True) / qmax
        # Powers of two are up to twice as large.
        most = 2 * amax if isinstance(inputs.cell, QuantisedCell) and inputs.cell.packed else amax
        _require("y_scale", torch.maximum(amax - scale, scale - most), 1e-2 * amax)
    relative, step = _STEPS[got.dtype]
    _require("y", (got.float() * scale - want).abs_(), relative * want.abs() + step * scale)


def _scales(outputs: Mapping[str, torch.Tensor], shape: torch.Size, inputs: Inputs) -> torch.Tensor:
    """Return the scales of a provider as factors, in the shape (rows, groups)."""
    cell, y_scale = inputs.cell, outputs.get("y_scale")
    if not isinstance(cell, QuantisedCell) or not cell.columns:
        if y_scale is None or y_scale.numel() != shape[0]:
            raise WrongOutputError("y_scale is missing, or not one value a row")
        return y_scale.reshape(shape).float()
    stored = torch.Size((shape[0], shape[1] // 4)) if cell.packed else shape
    dtype = torch.int32 if cell.packed else torch.float32
    if y_scale is None or y_scale.shape != stored or y_scale.dtype != dtype:
        what = "missing" if y_scale is None else f"{tuple(y_scale.shape)} {y_scale.dtype}"
        raise WrongOutputError(f"y_scale is {what}, not {tuple(stored)} {dtype}")
    side_by_side = 0 if cell.column_major else 1
    if y_scale.shape[side_by_side] > 1 and y_scale.stride(side_by_side) != 1:
        raise WrongOutputError(f"y_scale has strides {y_scale.stride()}, which is the other layout")
    return (y_scale.flatten().view(torch.uint8).view(shape).float() - 127).exp2() if cell.packed else y_scale


def _require(name: str, error: torch.Tensor, tolerance: torch.Tensor) -> None:
    # Written so that a NaN fails.
    if not bool((error <= tolerance).all()):
        raise WrongOutputError(f"{name} is wrong by {float((error / tolerance).max()):.3g} times its tolerance")

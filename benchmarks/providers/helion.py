"""Helion's pretuned kernels, forward ones alone: it has no backward pass that is pretuned."""

from __future__ import annotations

from typing import Any

import torch

from ..cells import Cell, Norm, QuantisedCell, Task
from ..inputs import Inputs
from ..provider import Prepared, Provider, load, named

_MODULE = "benchmarks.pretuned"


def _layer_forward(inputs: Inputs) -> Prepared:
    run = load(_MODULE).layer_norm
    return Prepared(lambda: run(inputs.x, inputs.weight, inputs.bias), named("y"))


def _rms_forward(inputs: Inputs) -> Prepared:
    run = load(_MODULE).rms_norm
    return Prepared(lambda: run(inputs.x, inputs.weight, inputs.eps), named("y"))


def _rms_quantised(inputs: Inputs) -> Prepared:
    cell, module, (x, weight) = inputs.cell, load(_MODULE), (inputs.x, inputs.weight)
    columns, column_major = (cell.columns, cell.column_major) if isinstance(cell, QuantisedCell) else (0, False)
    groups = cell.n // columns if columns else 1
    # The sum is written over it; only the first call sees the drawn one.
    residual = None if inputs.residual is None else inputs.residual.clone()
    run, options = (module.per_block, (columns, column_major)) if columns else (module.per_token, ())

    def call() -> Any:
        y = torch.empty(x.shape, dtype=inputs.out_dtype, device=x.device)
        shape = (groups, cell.m) if column_major else (cell.m, groups)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        scales = scales.t() if column_major else scales
        run(y, x, weight, scales, inputs.eps, None, residual, *options)
        return (y, scales) if residual is None else (y, scales, residual)

    return Prepared(call, named("y", "y_scale", "residual_out"))


def _offers(cell: Cell) -> bool:
    if isinstance(cell, QuantisedCell):
        return cell.columns in (0, 64, 128) and not (cell.static or cell.packed or cell.unquantised)
    return not cell.smooth and not cell.heads[0]


PROVIDERS = (
    Provider(
        "helion",
        "Helion",
        (_MODULE,),
        {
            (Task.FORWARD, Norm.LAYER): _layer_forward,
            (Task.FORWARD, Norm.RMS): _rms_forward,
            **dict.fromkeys(
                [(task, Norm.RMS) for task in (Task.QUANT, Task.ADD_QUANT, Task.QUANTISED, Task.ADD_QUANTISED)],
                _rms_quantised,
            ),
        },
        distribution="helion",
        offers=_offers,
    ),
)

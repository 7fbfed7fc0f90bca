"""FlashInfer's norms for inference: CuTe DSL kernels where that is installed, and else CUDA ones, compiled by nvcc."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..cells import Cell, Norm, QuantisedCell, Task
from ..inputs import Inputs
from ..provider import Prepared, Provider, load, named

_MODULE = "flashinfer.norm"
# Scales of the kernel that quantises in groups lie in columns of a multiple of so many rows.
_ROWS = 4


def _layer_operands(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, and weight and bias in fp32, which is what it takes."""
    assert inputs.bias is not None
    return inputs.x, inputs.weight.float(), inputs.bias.float()


def _sum_of(inputs: Inputs) -> torch.Tensor:
    """Return a copy of residual, which the sum overwrites; only the first call has the drawn residual."""
    assert inputs.residual is not None
    return inputs.residual.clone()


def _layer_forward(inputs: Inputs) -> Prepared:
    return Prepared(partial(load(_MODULE).layernorm, *_layer_operands(inputs), inputs.eps), named("y"))


def _rms_forward(inputs: Inputs) -> Prepared:
    return Prepared(partial(load(_MODULE).rmsnorm, inputs.x, inputs.weight, inputs.eps), named("y"))


def _rms_add(inputs: Inputs) -> Prepared:
    run, residual = load(_MODULE).fused_add_rmsnorm, _sum_of(inputs)
    # Y is written over it.
    x = inputs.x.clone()

    def call() -> Any:
        run(x, residual, inputs.weight, inputs.eps)
        return x, residual

    return Prepared(call, named("y", "residual_out"))


def _quantised(inputs: Inputs) -> Prepared:
    """By the scale that is given."""
    module = load(_MODULE)
    run, names = module.rmsnorm_quant, ["y"]
    tensors: tuple[torch.Tensor, ...] = (inputs.x, inputs.weight)
    if inputs.cell.norm is Norm.LAYER:
        run, tensors = module.layernorm_quant, _layer_operands(inputs)
    elif inputs.residual is not None:
        run, names = module.fused_add_rmsnorm_quant, ["y", "residual_out"]
        tensors = (inputs.x, _sum_of(inputs), inputs.weight)

    def call() -> Any:
        y = torch.empty(inputs.x.shape, dtype=inputs.out_dtype, device=inputs.x.device)
        run(y, *tensors, inputs.y_scale, inputs.eps)
        return (y, *tensors[1 : len(names)])

    return Prepared(call, named(*names))


def _both(inputs: Inputs) -> Prepared:
    """Quantise in groups of 128 columns, and return y in 16 bits too."""
    run, residual = load(_MODULE).fused_add_rmsnorm_fp8_block_quant, _sum_of(inputs)
    cell, x = inputs.cell, inputs.x
    assert isinstance(cell, QuantisedCell)
    shape = (cell.n // cell.columns, -(-cell.m // _ROWS) * _ROWS)

    def call() -> Any:
        y = torch.empty(x.shape, dtype=inputs.out_dtype, device=x.device)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
        unquantised = torch.empty_like(x)
        run(y, scales, unquantised, x, residual, inputs.weight, inputs.eps)
        return y, scales.t()[: cell.m], residual, unquantised

    return Prepared(call, named("y", "y_scale", "residual_out", "unquantised"))


def _offers(cell: Cell) -> bool:
    if isinstance(cell, QuantisedCell) and (not cell.static or cell.unquantised):
        return False
    if cell.norm is Norm.LAYER:
        return cell.dtype == "bf16" and not cell.heads[0]
    return cell.dtype in ("bf16", "fp16")


def _offers_both(cell: Cell) -> bool:
    return isinstance(cell, QuantisedCell) and cell.columns == 128 and cell.column_major and not cell.packed


def _kernels() -> str:
    return "CUDA kernels" if load(_MODULE)._USE_CUDA_NORM else "CuTe DSL kernels"


PROVIDERS = (
    Provider(
        "flashinfer",
        "FlashInfer",
        (_MODULE,),
        {
            (Task.FORWARD, Norm.LAYER): _layer_forward,
            (Task.FORWARD, Norm.RMS): _rms_forward,
            (Task.ADD, Norm.RMS): _rms_add,
            (Task.QUANTISED, Norm.LAYER): _quantised,
            (Task.QUANTISED, Norm.RMS): _quantised,
            (Task.ADD_QUANTISED, Norm.RMS): _quantised,
        },
        distribution="flashinfer-python",
        library=_kernels,
        offers=_offers,
    ),
    # It writes more than cells that ask for one output, and says so where it is named.
    Provider(
        "flashinfer-both",
        "FlashInfer, 16 bits too",
        (_MODULE,),
        {(Task.ADD_QUANTISED, Norm.RMS): _both},
        distribution="flashinfer-python",
        library=_kernels,
        offers=_offers_both,
    ),
)

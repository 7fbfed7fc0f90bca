"""This project, through its public functions."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

import normforge
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd

from .. import fp8_inputs, gates, modulations, quantisations
from ..cells import DTYPES, Norm, Task
from ..expressions import module_builders
from ..fp8_cells import Fp8Cell
from ..gated_cells import GatedCell
from ..group_cells import GroupCell
from ..groups import EPS, Function, builders
from ..inputs import DROPOUT_P, Inputs
from ..modulated_cells import ModulatedCell
from ..provider import Builder, Prepared, Provider, named
from ..quantised_cells import QuantisedCell
from ..suites.batch_invariant import GROUPS


def _forward(inputs: Inputs) -> Prepared:
    options: dict[str, Any] = {"eps": inputs.eps}
    task = inputs.cell.task
    if task.adds:
        options |= {"residual": inputs.residual, "fadd": "pre_add_store"}
    if task is Task.DROP_ADD:
        # By torch's generator, as a step of training: what draws the seed is timed too.
        options["dropout_p"] = DROPOUT_P
    if task.quantises:
        options |= {"fquant": "dynamic", "out_dtype": inputs.out_dtype}
    if inputs.cell.smooth:
        options |= {"fquant": "smooth_dynamic", "smooth_scale": inputs.smooth_scale}
    if inputs.cell.norm is Norm.LAYER:
        options["bias"] = inputs.bias
    function: Any = {Norm.LAYER: normforge.layernorm2d_fwd, Norm.RMS: normforge.rmsnorm2d_fwd}[inputs.cell.norm]
    return Prepared(partial(function, inputs.x, inputs.weight, **options), lambda returned: returned._asdict())


def _backward(inputs: Inputs) -> Prepared:
    arguments = (inputs.dy, inputs.x, inputs.weight)
    statistics = {"rstd": inputs.rstd} if inputs.mean is None else {"mean": inputs.mean, "rstd": inputs.rstd}
    wants = ("dx", "dweight") if inputs.bias is None else ("dx", "dweight", "dbias")
    function: Any = {Norm.LAYER: layernorm2d_bwd, Norm.RMS: rmsnorm2d_bwd}[inputs.cell.norm]
    return Prepared(partial(function, *arguments, **statistics, wants=wants), lambda returned: returned._asdict())


def _differentiable(inputs: Inputs, leaves: tuple[torch.Tensor, ...]) -> Any:
    shape = (inputs.cell.n,)
    if inputs.cell.norm is Norm.LAYER:
        x, weight, bias = leaves
        return partial(normforge.layer_norm, x, shape, weight, bias, inputs.eps)
    x, weight = leaves
    return partial(normforge.rms_norm, x, shape, weight, inputs.eps)


def _grad_forward(inputs: Inputs) -> Prepared:
    return Prepared(_differentiable(inputs, inputs.leaves()), named("y"))


def _grad_both(inputs: Inputs) -> Prepared:
    leaves = inputs.leaves()
    run = _differentiable(inputs, leaves)
    return Prepared(lambda: torch.autograd.grad(run(), leaves, inputs.dy), named("dx", "dweight", "dbias"))


def _grouped(cell: GroupCell) -> Function:
    activation = "silu" if cell.silu else None
    return lambda x, weight, bias: normforge.group_norm(x, cell.groups, weight, bias, EPS, activation=activation)


def _scaled(cell: Fp8Cell, eps: float) -> fp8_inputs.Function:
    function: Any = normforge.layernorm2d_fwd if cell.norm is Norm.LAYER else normforge.rmsnorm2d_fwd
    out_dtype = DTYPES[cell.out_dtype]

    def run(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        biased = {} if bias is None else {"bias": bias}
        y: torch.Tensor = function(x, weight, **biased, eps=eps, x_scale=x_scale, out_dtype=out_dtype).y
        return y

    return run


def _gated(cell: GatedCell, eps: float) -> Function:
    function: Any = normforge.gated_layer_norm if cell.norm is Norm.LAYER else normforge.gated_rms_norm
    return partial(function, norm_before_gate=not cell.gate_first, group_size=cell.columns or None, eps=eps)


def _modulated(cell: ModulatedCell, eps: float) -> modulations.Function:
    function: Any = normforge.modulated_layer_norm if cell.norm is Norm.LAYER else normforge.modulated_rms_norm

    def run(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *others: torch.Tensor) -> Any:
        return function(x, scale, shift, eps=eps, **dict(zip(("gate", "residual"), others, strict=False)))

    return run


def _quantised(cell: QuantisedCell, eps: float) -> quantisations.Function:
    options: dict[str, Any] = {"eps": eps, "out_dtype": torch.float8_e4m3fn, "save_unquant": cell.unquantised}
    if cell.static:
        options["fquant"] = "static"
    if cell.columns:
        options["group_size"] = cell.columns
        options["scale_layout"] = "column_major" if cell.column_major else "row_major"
        options["scale_format"] = "ue8m0_packed" if cell.packed else "float"
    function: Any = normforge.quantised_rms_norm
    if cell.norm is Norm.LAYER:
        function = normforge.quantised_layer_norm

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any, given: Any) -> dict[str, torch.Tensor]:
        biased = (weight,) if bias is None else (weight, bias)
        made: dict[str, torch.Tensor] = function(x, *biased, residual=residual, y_scale=given, **options)._asdict()
        return made

    return run


def _invariant(builder: Builder) -> Builder:
    """Make the call under batch invariance, which costs the host a few microseconds."""

    def build(inputs: Inputs) -> Prepared:
        prepared = builder(inputs)

        def call() -> Any:
            with normforge.batch_invariant():
                return prepared.call()

        return Prepared(call, prepared.outputs)

    return build


_BUILDERS: dict[Task, Builder] = {
    Task.FORWARD: _forward,
    Task.ADD: _forward,
    Task.DROP_ADD: _forward,
    Task.QUANT: _forward,
    Task.ADD_QUANT: _forward,
    Task.BACKWARD: _backward,
    Task.GRAD_FORWARD: _grad_forward,
    Task.GRAD_BOTH: _grad_both,
}

PROVIDERS = (
    Provider(
        "normforge",
        "normforge",
        ("normforge",),
        {(task, norm): builder for (task, builder), norm in product(_BUILDERS.items(), Norm)}
        | builders(_grouped)
        | module_builders({Norm.LAYER: normforge.LayerNorm, Norm.RMS: normforge.RMSNorm})
        | fp8_inputs.builders(_scaled)
        | gates.builders(_gated)
        | modulations.builders(_modulated)
        | quantisations.builders(_quantised),
    ),
    Provider(
        "normforge-batch-invariant",
        "normforge batch-invariant",
        ("normforge",),
        {(task, norm): _invariant(builder) for (task, builder), norm in product(_BUILDERS.items(), Norm)},
        groups=GROUPS,
    ),
)

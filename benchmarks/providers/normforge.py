"""This project, through its public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import normforge
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd

from ..cells import ChannelsCell, GatedCell, GroupCell, ModulatedCell, Norm, QuantisedCell, RotaryCell, Task
from ..expressions import module_builders
from ..inputs import DROPOUT_P, Inputs
from ..provider import RECORDED, Builder, Prepared, Provider, calls, named
from ..suites.batch_invariant import GROUPS

_BACKWARD = {Norm.LAYER: layernorm2d_bwd, Norm.RMS: rmsnorm2d_bwd}


def _bind(inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
    cell, eps = inputs.cell, inputs.eps
    layer = cell.norm is Norm.LAYER
    x, *others = tensors.values()
    norm: Any = normforge.layer_norm if layer else normforge.rms_norm
    if isinstance(cell, ChannelsCell):
        return partial(norm, x, x.shape[1:2], *others, eps, dim=1)
    if isinstance(cell, RotaryCell):
        return partial(normforge.qk_norm_rope, x, *others, *inputs.tables, eps=eps)
    if isinstance(cell, GroupCell):
        grouped: Any = normforge.group_norm
        return partial(grouped, x, cell.groups, *others, eps, activation="silu" if cell.silu else None)
    if isinstance(cell, GatedCell):
        gated: Any = normforge.gated_layer_norm if layer else normforge.gated_rms_norm
        columns = cell.columns or None
        return partial(gated, x, *others, norm_before_gate=not cell.gate_first, group_size=columns, eps=eps)
    if isinstance(cell, ModulatedCell):
        modulated: Any = normforge.modulated_layer_norm if layer else normforge.modulated_rms_norm
        scale, shift, *branch = others
        return partial(modulated, x, scale, shift, eps=eps, **dict(zip(("gate", "residual"), branch, strict=False)))
    if cell.task.renorms:
        behind: Any = normforge.layer_norm_add if layer else normforge.rms_norm_add
        names = ("weight", "bias", "next_weight", "next_bias") if layer else ("weight", "next_weight")
        residual, *vectors = others
        return partial(behind, x, residual, eps=eps, **dict(zip(names, vectors, strict=True)))
    if isinstance(cell, QuantisedCell) and cell.way:
        return _latents(inputs, cell)
    if isinstance(cell, QuantisedCell):
        quantised: Any = normforge.quantised_layer_norm if layer else normforge.quantised_rms_norm
        options = _quantisation(cell)
        return partial(quantised, x, *others, residual=inputs.residual, y_scale=inputs.y_scale, eps=eps, **options)
    if cell.task in RECORDED:
        return partial(norm, x, (cell.n,), *others, eps)
    forward: Any = normforge.layernorm2d_fwd if layer else normforge.rmsnorm2d_fwd
    return partial(forward, x, inputs.weight, **_options(inputs))


def _latents(inputs: Inputs, cell: QuantisedCell) -> Callable[[], Any]:
    """Return a call whose result is that of the first latent, which the oracle knows."""
    options = {"eps": inputs.eps, **_quantisation(cell)}
    problems: list[Any] = [(inputs.x, inputs.weight, options), (inputs.gate, inputs.scale, options)]
    if cell.way == "together":
        return lambda: normforge.rms_norms(problems)[0]
    q, kv = (partial(normforge.quantised_rms_norm, x, weight, **options) for x, weight, _ in problems)
    return q if cell.way == "alone" else lambda: (q(), kv())[0]


def _options(inputs: Inputs) -> dict[str, Any]:
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
    if inputs.x_scale is not None:
        options |= {"x_scale": inputs.x_scale, "out_dtype": inputs.out_dtype}
    if inputs.bias is not None:
        options["bias"] = inputs.bias
    return options


def _quantisation(cell: QuantisedCell) -> dict[str, Any]:
    options: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "save_unquant": cell.unquantised}
    if cell.static:
        options["fquant"] = "static"
    if cell.columns:
        options["group_size"] = cell.columns
        options["scale_layout"] = "column_major" if cell.column_major else "row_major"
        options["scale_format"] = "ue8m0_packed" if cell.packed else "float"
    return options


def _backward(inputs: Inputs) -> Prepared:
    arguments = (inputs.dy, inputs.x, inputs.weight)
    statistics = {"rstd": inputs.rstd} if inputs.mean is None else {"mean": inputs.mean, "rstd": inputs.rstd}
    wants = ("dx", "dweight") if inputs.bias is None else ("dx", "dweight", "dbias")
    function: Any = _BACKWARD[inputs.cell.norm]
    return Prepared(partial(function, *arguments, **statistics, wants=wants), named())


def _invariant(builder: Builder) -> Builder:
    """Make the call under batch invariance, which costs the host a few microseconds."""

    def build(inputs: Inputs) -> Prepared:
        prepared = builder(inputs)

        def call() -> Any:
            with normforge.batch_invariant():
                return prepared.call()

        return Prepared(call, prepared.outputs)

    return build


_BUILDERS = (
    calls(_bind, set(Task) - {Task.MODULE, Task.BACKWARD})
    | {(Task.BACKWARD, norm): _backward for norm in Norm}
    | module_builders({Norm.LAYER: normforge.LayerNorm, Norm.RMS: normforge.RMSNorm})
)

PROVIDERS = (
    Provider("normforge", "normforge", ("normforge",), _BUILDERS),
    Provider(
        "normforge-batch-invariant",
        "normforge batch-invariant",
        ("normforge",),
        {key: _invariant(builder) for key, builder in _BUILDERS.items()},
        groups=GROUPS,
    ),
)

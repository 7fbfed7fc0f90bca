"""Every family's formula by torch's operators: run eagerly, compiled, and in fp64 as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .cells import ChannelsCell, Fp8Cell, GatedCell, GroupCell, ModulatedCell, Norm, QuantisedCell, RotaryCell, Task
from .inputs import DROPOUT_P, QMAX, Inputs
from .provider import Builders, Prepared, calls, named

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]
Function = Callable[..., Any]

# Each operator of an expression rounds. Torch rounds GroupNorm before SiLU, and its gradient: dx was up to 1.7
# tolerances off on an H200. Of modulated norms a gate, the sum, the norm, 1 + scale, the product and y are rounded: y
# was up to 1.7 tolerances off, dx up to 3.2. Of two norms the first, the sum and the second are. Torch's LayerNorm over
# channels had a dweight 1.3 tolerances off on a CPU.
_ALLOWANCES = {
    **dict.fromkeys((Task.GROUP, Task.GROUP_BACKWARD, Task.CHANNELS_BACKWARD), 2.0),
    **dict.fromkeys((Task.MODULATED, Task.MODULATED_BACKWARD, Task.RENORMED, Task.RENORMED_BACKWARD), 4.0),
}
# Engines replace the scale of zeros with this.
_LEAST_SCALE = 1e-10
# A byte of a packed scale is an exponent of fp32 as fp32 has it; the mantissa has so many bits.
_MANTISSA = 23


def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm; without a bias RMSNorm."""
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add(x: torch.Tensor, residual: torch.Tensor, *vectors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual and normalise the rounded sum, as a model written in torch does."""
    residual_out = x + residual
    return normalise(residual_out, *vectors), residual_out


def renormed(eps: float, x: torch.Tensor, residual: torch.Tensor, *vectors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise, add to the residual, and normalise the rounded sum: vectors are those of either norm."""
    weight, bias, next_weight, next_bias = vectors if len(vectors) > 2 else (vectors[0], None, vectors[1], None)
    total = residual + normalise(x, weight, bias, eps)
    return normalise(total, next_weight, next_bias, eps), total


def over_channels(x: torch.Tensor, *vectors: Any) -> torch.Tensor:
    """Normalise over dim 1, by the norm of the last one."""
    return normalise(x.movedim(1, -1), *vectors).movedim(-1, 1)


def rotary(
    eps: float, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *tables: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Normalise and rotate each head in fp32 (or fp64), and round once."""
    cos, sin = (torch.cat((table, table), -1).unsqueeze(1) for table in tables)

    def rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
        first, second = y.chunk(2, -1)
        return (y * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

    return rotated(q, q_weight), rotated(k, k_weight)


def drop_add(x: torch.Tensor, residual: torch.Tensor, *vectors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop elements of x, add the residual and normalise the rounded sum."""
    return add(F.dropout(x, DROPOUT_P), residual, *vectors)


def quantise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    smooth_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise in fp32 and quantise each row by its largest value."""
    y = normalise(x.float(), weight.float(), None if bias is None else bias.float(), eps)
    z = y if smooth_scale is None else y * smooth_scale
    qmax = QMAX[out_dtype]
    y_scale = z.abs().amax(-1, keepdim=True) / qmax
    ratio = (z / y_scale).clamp(-qmax, qmax)
    return (ratio if out_dtype.is_floating_point else ratio.round()).to(out_dtype), y_scale


def add_quantise(x: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """Add the residual, and quantise the norm of the rounded sum."""
    residual_out = x + residual
    return (*quantise(residual_out, *others), residual_out)


def rescale(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Normalise fp8 rows times their scale, in fp32, and round once."""
    wide = None if bias is None else bias.float()
    return normalise(x.float() * x_scale, weight.float(), wide, eps).to(out_dtype)


def group(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, eps: float, silu: bool
) -> torch.Tensor:
    """GroupNorm, and SiLU where it follows."""
    y = F.group_norm(x, groups, weight, bias, eps)
    return F.silu(y) if silu else y


def gated(cell: GatedCell, eps: float) -> Function:
    """Compute the norm in fp32 (or fp64) and round once, as models without a kernel do."""

    def run(
        x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        factor, s = F.silu(gate.to(wide)), x.to(wide)
        s = s * factor if cell.gate_first else s
        rows = s.view(*s.shape[:-1], -1, cell.columns or cell.n)
        if cell.norm is Norm.LAYER:
            rows = rows - rows.mean(-1, keepdim=True)
        y = (rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()).view(s.shape) * weight
        y = y if bias is None else y + bias
        return (y if cell.gate_first else y * factor).to(x.dtype)

    return run


def modulated(cell: ModulatedCell, eps: float) -> Function:
    """Compute the norm as DiT does: sum and modulation in the dtypes of the operands."""

    def run(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        gate: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> Any:
        if gate is not None and residual is not None:
            x = residual + x * gate.unsqueeze(1)
        norm = F.layer_norm if cell.norm is Norm.LAYER else F.rms_norm
        y = norm(x, (cell.n,), eps=eps) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return y if gate is None else (y, x)

    return run


def quantised(cell: QuantisedCell, eps: float) -> Function:
    """Compute a cell in the order and with the roundings of vLLM's native operators.

    The residual is added in fp32, and the norm is of the sum as it is stored. y is rounded to x's type before it is
    quantised; RMSNorm also before its weight.
    """

    def run(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        given: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = {}
        s = x.float()
        if residual is not None:
            outputs["residual_out"] = (s + residual.float()).to(x.dtype)
            s = outputs["residual_out"].float()
        if bias is None:
            y = (s * (s.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
        else:
            y = F.layer_norm(s, (cell.n,), weight.float(), bias.float(), eps).to(x.dtype)
        if cell.unquantised:
            outputs["unquantised"] = y
        return outputs | _quantised(cell, y, given)

    return run


def latents(cell: QuantisedCell, eps: float) -> Function:
    """Compute both latents as `quantised`, or the first alone."""

    def run(x: torch.Tensor, weight: torch.Tensor, kv: torch.Tensor, kv_weight: torch.Tensor) -> Any:
        outputs = quantised(cell, eps)(x, weight, None, None, None)
        if cell.way == "alone":
            return outputs
        second = quantised(replace(cell, n=cell.kv_columns), eps)(kv, kv_weight, None, None, None)
        return outputs | {f"kv_{name}": tensor for name, tensor in second.items()}

    return run


def _quantised(cell: QuantisedCell, y: torch.Tensor, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    dtype = torch.float8_e4m3fn
    qmax = QMAX[dtype]
    if given is not None:
        return {"y": (y * given.reciprocal()).clamp(-qmax, qmax).to(dtype)}
    groups = y.view(-1, cell.n // cell.group_columns, cell.group_columns)
    scales = groups.abs().amax(-1, keepdim=True).float() / qmax
    if cell.packed:
        scales = scales.log2().ceil().exp2()
    scales = scales.clamp(min=_LEAST_SCALE)
    rounded = (groups / scales).clamp(-qmax, qmax).to(dtype).view(y.shape)
    scales = scales.squeeze(-1)
    if cell.packed:
        exponents = (scales.view(torch.int32) >> _MANTISSA).view(len(y), -1, 4)
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=y.device)
        scales = (exponents << shifts).sum(-1, dtype=torch.int32)
    if cell.column_major:
        scales = scales.t().contiguous().t()
    return {"y": rounded, "y_scale": scales}


def expression(inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> tuple[Function, tuple[Any, ...]]:
    """Return the formula of a cell, and its arguments.

    Args:
        inputs: the cell's.
        tensors: its operands, or leaves in their place.
    """
    cell, eps, residual = inputs.cell, inputs.eps, inputs.residual
    x, weight, bias = tensors["x"], tensors.get("weight"), tensors.get("bias")
    norm = (weight, bias, eps)
    if isinstance(cell, (GatedCell, ModulatedCell)):
        made = gated(cell, eps) if isinstance(cell, GatedCell) else modulated(cell, eps)
        return made, tuple(tensors.values())
    if cell.task.renorms:
        return renormed, (eps, *tensors.values())
    if isinstance(cell, RotaryCell):
        return rotary, (eps, *tensors.values(), *inputs.tables)
    if isinstance(cell, ChannelsCell):
        return over_channels, (x, *norm)
    if isinstance(cell, GroupCell):
        return group, (x, weight, bias, cell.groups, eps, cell.silu)
    if isinstance(cell, QuantisedCell) and cell.way:
        return latents(cell, eps), (x, weight, inputs.gate, inputs.scale)
    if isinstance(cell, QuantisedCell):
        return quantised(cell, eps), (x, weight, bias, residual, inputs.y_scale)
    if isinstance(cell, Fp8Cell):
        return rescale, (x, inputs.x_scale, *norm, inputs.out_dtype)
    quantisation = (inputs.smooth_scale, inputs.out_dtype)
    formulas: dict[Task, tuple[Function, tuple[Any, ...]]] = {
        Task.ADD: (add, (x, residual, *norm)),
        Task.DROP_ADD: (drop_add, (x, residual, *norm)),
        Task.QUANT: (quantise, (x, *norm, *quantisation)),
        Task.ADD_QUANT: (add_quantise, (x, residual, *norm, *quantisation)),
    }
    return formulas.get(cell.task, (normalise, (x, *norm)))


def torch_builders(transform: Transform) -> Builders:
    """Builders of every task that run `transform` of the formulas.

    Of the backward pass only autograd's engine is timed, on a graph that was recorded before and is kept: what an
    optimiser step pays, and the same for both norms and for compiled and eager graphs.
    """

    def bind(inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
        function, arguments = expression(inputs, tensors)
        return partial(transform(function), *arguments)

    tasks = set(Task) - {Task.MODULE}
    modules = module_builders({Norm.LAYER: torch.nn.LayerNorm, Norm.RMS: torch.nn.RMSNorm}, transform)
    return calls(bind, tasks, allowances=_ALLOWANCES) | modules


def module_builders(
    kinds: Mapping[Norm, Callable[..., torch.nn.Module]], transform: Transform | None = None
) -> Builders:
    """Builders of calls of modules, `transform`ed, given classes whose constructors are torch's."""

    def build(inputs: Inputs) -> Prepared:
        x = inputs.x
        module = kinds[inputs.cell.norm](inputs.cell.n, eps=inputs.eps, device=x.device, dtype=x.dtype)
        state = {"weight": inputs.weight} | ({} if inputs.bias is None else {"bias": inputs.bias})
        module.load_state_dict(state)
        run = module if transform is None else transform(module)

        # Entering it is a part of every provider's time, under a microsecond.
        def call() -> Any:
            with torch.no_grad():
                return run(x)

        return Prepared(call, named("y"))

    return {(Task.MODULE, norm): build for norm in kinds}

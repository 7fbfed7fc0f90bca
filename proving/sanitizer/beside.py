"""Calls that are sanitised of kernels that the table lacks: dropout, modulation, gates, and GroupNorm, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

import normforge


@dataclass(frozen=True)
class Beside:
    """One call, and its gradients where it has any.

    Attributes:
        norm: "layer", "rms" or "group".
        step: what stands beside the norm: a word of `_CALLS`.
        shape: x's.
        dtype: x's.
        options: the call's arguments besides tensors, in a fixed order.
        last: of GroupNorm, whether channels are innermost in memory.
    """

    norm: str
    step: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, Any], ...] = ()
    last: bool = False

    @property
    def name(self) -> str:
        """One word for tables and logs."""
        dtype = str(self.dtype).removeprefix("torch.")
        told = "".join(f"_{str(value).removeprefix('torch.')}" for _, value in self.options)
        last = "_last" if self.last else ""
        return f"{self.norm}_{self.step}_{dtype}{told}{last}_{'x'.join(map(str, self.shape))}"

    @property
    def m(self) -> int:
        """How many rows there are, or samples."""
        return prod(self.shape[: 1 if self.norm == "group" else -1])

    @property
    def n(self) -> int:
        """How long they are."""
        return prod(self.shape) // self.m

    def call(self, device: torch.device) -> None:
        """Make the call: each tensor an allocation of its own, exactly as long as it is."""
        _CALLS[self.step](self, device)

    def filled(self, device: torch.device, *shape: int) -> torch.Tensor:
        """Return a tensor of x's type, by copies alone: what a kernel of torch's reads is not what is looked for."""
        values = torch.linspace(-1, 1, prod(shape)).to(self.dtype).view(shape)
        if self.last and len(shape) > 2:
            values = values.movedim(1, -1).contiguous().movedim(-1, 1)
        return torch.empty_like(values, device=device).copy_(values).requires_grad_()


def _differentiate(outputs: Any, leaves: list[torch.Tensor]) -> None:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.empty_like(each).copy_(torch.ones(each.shape)) for each in found]
    torch.autograd.grad(found, leaves, gradients)


def _vectors(cell: Beside, device: torch.device, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    length = cell.shape[1] if cell.norm == "group" else cell.shape[-1]
    return {name: cell.filled(device, length) for name in names}


def _affine(cell: Beside) -> tuple[str, ...]:
    return ("weight",) if cell.norm == "rms" else ("weight", "bias")


def _dropped(cell: Beside, device: torch.device) -> None:
    x, residual = (cell.filled(device, *cell.shape) for _ in range(2))
    vectors, rng = _vectors(cell, device, _affine(cell)), torch.empty(2, dtype=torch.int64, device=device)
    run: Any = normforge.add_rms_norm if cell.norm == "rms" else normforge.add_layer_norm
    outputs = run(x, residual, **vectors, dropout_rng=rng.copy_(torch.tensor([5, 7])), **dict(cell.options))
    _differentiate(outputs, [x, residual, *vectors.values()])


def _modulated(cell: Beside, device: torch.device) -> None:
    x, residual = (cell.filled(device, *cell.shape) for _ in range(2))
    of_samples = [cell.filled(device, cell.shape[0], cell.shape[-1]) for _ in range(3)]
    scale, shift, gate = of_samples
    run: Any = normforge.modulated_rms_norm if cell.norm == "rms" else normforge.modulated_layer_norm
    _differentiate(run(x, scale, shift), [x, scale, shift])
    _differentiate(run(x, scale, shift, gate=gate, residual=residual), [x, residual, *of_samples])


def _modulated_quantised(cell: Beside, device: torch.device) -> None:
    x, residual = (cell.filled(device, *cell.shape) for _ in range(2))
    scale, shift, gate = (cell.filled(device, cell.shape[0], cell.shape[-1]) for _ in range(3))
    run: Any = normforge.modulated_rmsnorm2d_fwd if cell.norm == "rms" else normforge.modulated_layernorm2d_fwd
    with torch.no_grad():
        run(x, scale, shift, gate=gate, residual=residual, fquant="dynamic", save_mv=True, **dict(cell.options))


def _gated(cell: Beside, device: torch.device) -> None:
    x, gate = (cell.filled(device, *cell.shape) for _ in range(2))
    vectors = _vectors(cell, device, _affine(cell))
    run: Any = normforge.gated_rms_norm if cell.norm == "rms" else normforge.gated_layer_norm
    _differentiate(run(x, gate, **vectors, **dict(cell.options)), [x, gate, *vectors.values()])


def _gated_quantised(cell: Beside, device: torch.device) -> None:
    x, gate = (cell.filled(device, *cell.shape) for _ in range(2))
    run: Any = normforge.gated_rmsnorm2d_fwd if cell.norm == "rms" else normforge.gated_layernorm2d_fwd
    with torch.no_grad():
        run(x, gate, **_vectors(cell, device, _affine(cell)), fquant="dynamic", save_mv=True, **dict(cell.options))


def _grouped(cell: Beside, device: torch.device) -> None:
    x, vectors = cell.filled(device, *cell.shape), _vectors(cell, device, _affine(cell))
    run: Any = normforge.group_norm
    with torch.no_grad():
        run(x, **vectors, **dict(cell.options))
    _differentiate(run(x, **vectors, **dict(cell.options)), [x, *vectors.values()])


_CALLS: dict[str, Callable[[Beside, torch.device], None]] = {
    "dropped": _dropped,
    "modulated": _modulated,
    "modulated_quantised": _modulated_quantised,
    "gated": _gated,
    "gated_quantised": _gated_quantised,
    "grouped": _grouped,
}

# Few rows, some and many, that start vectors and do not, of each pipeline.
_ROWS: tuple[tuple[int, ...], ...] = (
    (3, 100),
    (300, 100),
    (2100, 100),
    (3, 1000),
    (300, 1001),
    (3, 2051),
    (3, 4099),
    (300, 4104),
    (5, 9001),
    (3, 40001),
)
# Of samples with several rows.
_SAMPLES: tuple[tuple[int, ...], ...] = (
    (2, 3, 100),
    (2, 1050, 129),
    (3, 2, 4099),
    (2, 150, 1000),
    (2, 2, 9001),
    (1, 3, 40001),
)
_GATES: tuple[tuple[tuple[str, Any], ...], ...] = tuple(
    (("activation", activation), ("norm_before_gate", before))
    for activation, before in product(("silu", "sigmoid"), (True, False))
)
# x's shape and groups: several groups a program and one, ragged positions and channels, in parts; few and many.
_GROUPS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((2, 32, 5, 7), 8),
    ((40, 32, 5, 7), 8),
    ((1, 6, 33), 6),
    ((2, 64, 64, 65), 4),
    ((1, 8, 20001), 1),
    ((70, 24, 1031), 4),
)


def beside() -> Iterator[Beside]:
    """All of them."""
    told: tuple[tuple[str, Any], ...]
    for norm, shape in product(("layer", "rms"), _ROWS):
        yield Beside(norm, "dropped", shape, options=(("dropout_p", 0.3),))
        yield from (Beside(norm, "gated", shape, options=gate) for gate in _GATES)
        yield Beside(norm, "gated_quantised", shape, options=(("out_dtype", torch.int8),))
    for norm, shape in product(("layer", "rms"), _SAMPLES):
        yield Beside(norm, "modulated", shape)
        yield Beside(norm, "modulated_quantised", shape, options=(("out_dtype", torch.int8),))
    for norm, before in product(("layer", "rms"), (True, False)):
        told = (("norm_before_gate", before), ("group_size", 24))
        yield Beside(norm, "gated", (5, 96), options=told)
        yield Beside(norm, "gated", (5, 96), torch.float32, told)
    for norm, step in product(("layer", "rms"), ("dropped", "gated", "modulated")):
        told = (("dropout_p", 0.3),) if step == "dropped" else ()
        yield Beside(norm, step, (2, 3, 1001) if step == "modulated" else (5, 1001), torch.float32, told)
    for (shape, groups), activation, last in product(_GROUPS, ("none", "silu"), (False, True)):
        told = (("num_groups", groups), ("activation", activation))
        for dtype in (torch.bfloat16, torch.float32):
            yield Beside("group", "grouped", shape, dtype, told, last)

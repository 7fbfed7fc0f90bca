"""Random tensors of a cell, shared by every provider that is timed on it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .cells import DTYPES, Cell, Fp8Cell, GatedCell, GroupCell, ModulatedCell, Norm, QuantisedCell, RotaryCell, Task

EPS = {Norm.LAYER: 1e-5, Norm.RMS: 1e-6}
QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# How likely elements are dropped where any are.
DROPOUT_P = 0.1

# A given scale that divides all of y: few values reach 448 times this.
_GIVEN_SCALE = 1 / 32

# Elements that are converted to fp64 at once: 256 MiB of them.
_CHUNK = 2**25


@dataclass(frozen=True)
class Inputs:
    """A cell's tensors; None where its task has no use for one, and bias also for RMSNorm."""

    cell: Cell
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    smooth_scale: torch.Tensor | None = None
    dy: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    y_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    tables: tuple[torch.Tensor, ...] = ()

    @property
    def eps(self) -> float:
        """Every provider adds this to the variance or the mean square."""
        return EPS[self.cell.norm]

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of y."""
        return DTYPES[self.cell.out_dtype or self.cell.dtype]

    def operands(self) -> dict[str, torch.Tensor]:
        """Return the tensors that have gradients, by name, in the order that functions take them in."""
        names: tuple[str, ...] = ("x", "gate", "weight", "bias")
        if isinstance(self.cell, ModulatedCell):
            names = ("x", "scale", "shift", "gate", "residual")
        elif self.cell.task.renorms:
            # The second norm's weight and bias are called scale and shift.
            names = ("x", "residual", "weight", "bias", "scale", "shift")
        elif isinstance(self.cell, RotaryCell):
            # The gate is k, and the scale its weight.
            names = ("x", "gate", "weight", "scale")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return these tensors as leaves of a new autograd graph, over the same memory."""
        return {name: tensor.detach().requires_grad_() for name, tensor in self.operands().items()}

    def of_outputs(self) -> list[torch.Tensor]:
        """Return the gradients of y and of a second output: any tensor of its shape, so the residual serves."""
        return [given for given in (self.dy, self.residual) if given is not None]


def make_inputs(cell: Cell, device: torch.device, copy: int = 0) -> Inputs:
    """Draw a cell's tensors; the same ones for the same cell and copy."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{cell.id} {copy}".encode()))
    dtype = DTYPES[cell.out_dtype if isinstance(cell, Fp8Cell) else cell.dtype]
    shape = cell.sizes

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    def scale(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.rand(size, dtype=dtype, device=device, generator=generator) + 0.5

    def whole() -> torch.Tensor:
        drawn = normal(*shape)
        last = isinstance(cell, GroupCell) and cell.channels_last
        return drawn.movedim(1, -1).contiguous().movedim(-1, 1) if last else drawn

    x, given = whole(), dict[str, Any]()
    columns = shape[1] if isinstance(cell, GroupCell) else cell.n
    if isinstance(cell, RotaryCell):
        q, k = cell.heads[0], cell.heads[0] + cell.kv_heads
        packed = normal(shape[0], cell.heads[1], cell.n)
        x, given["gate"], given["scale"] = packed[:, :q], packed[:, q:k], scale(columns)
        angles = torch.rand(shape[0], cell.n // 2, device=device, generator=generator) * math.tau
        given["tables"] = (angles.cos(), angles.sin())
        if cell.task.differentiates:
            given["residual"] = normal(*given["gate"].shape)
    elif cell.heads[0]:
        x = normal(shape[0], cell.heads[1], cell.n)[:, : cell.heads[0]]
    elif isinstance(cell, QuantisedCell) and cell.way:
        # The gate is the second latent, and the scale its weight.
        packed = normal(cell.m, cell.n + cell.kv_columns)
        x, given["gate"] = packed[:, : cell.n], packed[:, cell.n :]
        given["scale"] = scale(cell.kv_columns)
    if isinstance(cell, GatedCell):
        x, given["gate"] = normal(*cell.leading, 2 * cell.n).chunk(2, -1) if cell.projected else (x, whole())
    elif isinstance(cell, ModulatedCell):
        # Scale, shift and gate are chunks of what a linear layer makes of a sample's condition.
        given["scale"], given["shift"], gate = normal(shape[0], 6 * cell.n).chunk(6, -1)[:3]
        given |= {"gate": gate, "residual": whole()} if cell.gated else {}
    elif isinstance(cell, Fp8Cell):
        x = x.to(DTYPES[cell.dtype])
        given["x_scale"] = scale(1 if cell.one_scale else cell.m, 1, dtype=torch.float32)
    elif isinstance(cell, QuantisedCell) and cell.static:
        given["y_scale"] = torch.full((1,), _GIVEN_SCALE, device=device)
    if cell.task.adds or cell.task.renorms:
        given["residual"] = whole()
    if cell.task.renorms:
        given |= {"scale": scale(columns), "shift": normal(columns) if cell.norm is Norm.LAYER else None}
    if cell.task.differentiates:
        given["dy"] = whole()
    if cell.task is Task.BACKWARD:
        given["mean"], given["rstd"] = statistics(x, cell.norm)
    if cell.smooth:
        given["smooth_scale"] = scale(columns)
    if cell.norm is Norm.LAYER:
        given["bias"] = normal(columns)
    return Inputs(cell, x, weight=scale(columns), **given)


def statistics(x: torch.Tensor, norm: Norm) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Mean, for LayerNorm, and rstd of each row, in fp32, as a forward pass saves them."""
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    for rows in chunks(x):
        s = x[rows].double()
        mean[rows] = s.mean(-1)
        centred = s - s.mean(-1, keepdim=True) if norm is Norm.LAYER else s
        rstd[rows] = (centred.square().mean(-1) + EPS[norm]).rsqrt()
    return mean if norm is Norm.LAYER else None, rstd


def chunks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of the first dimension, each small enough to be worked on in fp64."""
    m, *others = x.shape
    step = max(1, _CHUNK // math.prod(others))
    for start in range(0, m, step):
        yield slice(start, min(m, start + step))

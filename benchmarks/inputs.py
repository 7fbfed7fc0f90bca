"""Random tensors of a cell, shared by every provider that is timed on it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .cells import DTYPES, Cell, Norm
from .fp8_cells import Fp8Cell
from .gated_cells import GatedCell
from .group_cells import GroupCell
from .modulated_cells import ModulatedCell
from .quantised_cells import QuantisedCell

EPS = {Norm.LAYER: 1e-5, Norm.RMS: 1e-6}

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
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    smooth_scale: torch.Tensor | None
    dy: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None
    gate: torch.Tensor | None = None
    modulation: tuple[torch.Tensor, ...] = ()
    y_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None

    @property
    def eps(self) -> float:
        """Every provider adds this to the variance or the mean square."""
        return EPS[self.cell.norm]

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of y."""
        return DTYPES[self.cell.out_dtype or self.cell.dtype]

    def operands(self) -> tuple[torch.Tensor, ...]:
        """x, the gate if there is one, weight, and bias if there is one."""
        return tuple(tensor for tensor in (self.x, self.gate, self.weight, self.bias) if tensor is not None)

    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return these tensors as leaves of a new autograd graph, over the same memory."""
        return tuple(tensor.detach().requires_grad_() for tensor in self.operands())


def make_inputs(cell: Cell, device: torch.device, copy: int = 0) -> Inputs:
    """Draw a cell's tensors; the same ones for the same cell and copy."""
    if isinstance(cell, GroupCell):
        return _group_inputs(cell, device, copy)
    if isinstance(cell, ModulatedCell):
        return _modulated_inputs(cell, device, copy)
    if isinstance(cell, Fp8Cell):
        return _fp8_inputs(cell, device, copy)
    dtype, shape = DTYPES[cell.dtype], (*cell.leading, cell.n)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{cell.id} {copy}".encode()))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    def scale() -> torch.Tensor:
        return torch.rand(cell.n, dtype=dtype, device=device, generator=generator) + 0.5

    x = normal(*shape)
    if cell.heads[0]:
        x = normal(shape[0], cell.heads[1], cell.n)[:, : cell.heads[0]]
    gate = None
    if isinstance(cell, GatedCell):
        gate = normal(*shape)
        if cell.projected:
            x, gate = normal(*cell.leading, 2 * cell.n).chunk(2, -1)
    given = isinstance(cell, QuantisedCell) and cell.static
    saved = cell.task.differentiates and gate is None
    mean, rstd = statistics(x, cell.norm) if saved else (None, None)
    return Inputs(
        cell,
        x,
        weight=scale(),
        bias=normal(cell.n) if cell.norm is Norm.LAYER else None,
        residual=normal(*shape) if cell.task.adds else None,
        smooth_scale=scale() if cell.smooth else None,
        dy=normal(*shape) if cell.task.differentiates else None,
        mean=mean,
        rstd=rstd,
        gate=gate,
        y_scale=torch.full((1,), _GIVEN_SCALE, device=device) if given else None,
    )


def _group_inputs(cell: GroupCell, device: torch.device, copy: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{cell.id} {copy}".encode()))

    def normal(*size: int) -> torch.Tensor:
        drawn = torch.randn(size, dtype=DTYPES[cell.dtype], device=device, generator=generator)
        return drawn.movedim(1, -1).contiguous().movedim(-1, 1) if cell.channels_last else drawn

    channels = cell.shape[1]
    dy = normal(*cell.sizes) if cell.task.differentiates else None
    weight, bias = (normal(1, channels)[0] for _ in range(2))
    return Inputs(cell, normal(*cell.sizes), weight + 1, bias, None, None, dy, None, None)


def _modulated_inputs(cell: ModulatedCell, device: torch.device, copy: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{cell.id} {copy}".encode()))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=DTYPES[cell.dtype], device=device, generator=generator)

    shape = (*cell.leading, cell.n)
    # Scale, shift and gate are chunks of what a linear layer makes of a sample's condition.
    scale, shift, gate = normal(shape[0], 6 * cell.n).chunk(6, -1)[:3]
    return Inputs(
        cell,
        normal(*shape),
        weight=torch.ones(cell.n, device=device),
        bias=None,
        residual=normal(*shape) if cell.gated else None,
        smooth_scale=None,
        dy=normal(*shape) if cell.task.differentiates else None,
        mean=None,
        rstd=None,
        modulation=(scale, shift, gate) if cell.gated else (scale, shift),
    )


def _fp8_inputs(cell: Fp8Cell, device: torch.device, copy: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{cell.id} {copy}".encode()))
    dtype = DTYPES[cell.out_dtype]

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    def scale(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(size, dtype=dtype, device=device, generator=generator) + 0.5

    return Inputs(
        cell,
        normal(*cell.leading, cell.n).to(DTYPES[cell.dtype]),
        weight=scale(cell.n, dtype=dtype),
        bias=normal(cell.n) if cell.norm is Norm.LAYER else None,
        residual=None,
        smooth_scale=None,
        dy=None,
        mean=None,
        rstd=None,
        x_scale=scale(1 if cell.one_scale else cell.m, 1, dtype=torch.float32),
    )


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

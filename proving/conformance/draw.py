"""The tensors of a case: the same for the same seed, whichever process draws them and in whatever order."""

from __future__ import annotations

import math
import zlib

import torch

from .case import RESIDUAL_OUT, Case, Draw, Y

# fp32 numbers that are drawn at once, before they are rounded to the tensor's own type.
_AT_ONCE = 1 << 26


def operands(case: Case, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor that the call takes, and the gradients that arrive, by name.

    Between rows that do not adjoin, and before the first, memory holds NaN: what reads it shows.
    """
    rows: dict[str, torch.dtype | None] = {
        "x": case.x,
        "residual": case.residual,
        "gate": case.gate,
        "dy": (case.dy or case.y) if Y in case.arriving else None,
        "dresidual_out": case.residual if RESIDUAL_OUT in case.arriving else None,
    }
    columns: dict[str, torch.dtype | None] = {
        "weight": case.weight,
        "bias": case.bias,
        "x_bias": case.x_bias,
        "smooth_scale": case.smooth_scale,
    }

    def generator(name: str) -> torch.Generator:
        return torch.Generator(device).manual_seed(zlib.crc32(f"{case.id} {name} {seed}".encode()))

    drawn = {}
    for name, dtype in rows.items():
        if dtype is not None:
            stride = case.row_stride or case.n
            tensor = _empty_rows(case.shape, stride, case.offset, dtype, device)
            _fill(tensor, getattr(case.inputs, name), generator(name))
            drawn[name] = tensor
    for name, dtype in columns.items():
        if dtype is not None:
            tensor = torch.empty(1, case.channels or case.n, dtype=dtype, device=device)
            _fill(tensor, getattr(case.inputs, name), generator(name))
            drawn[name] = tensor[0]
    return drawn


def _empty_rows(
    shape: tuple[int, ...], stride: int, offset: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    *leading, n = shape
    rows = math.prod(leading)
    if stride == n and not offset:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = torch.full((offset + rows * stride,), float("nan"), dtype=dtype, device=device)
    return memory[offset:].view(*leading, stride)[..., :n]


def _fill(tensor: torch.Tensor, draw: Draw, generator: torch.Generator) -> None:
    n = tensor.shape[-1]
    spread = draw.spread / (2 * n) if draw.over_2n else draw.spread
    flat = tensor.view(-1, n) if tensor.is_contiguous() else tensor.flatten(0, -2)
    assert flat.data_ptr() == tensor.data_ptr()
    block = max(1, _AT_ONCE // n)
    for start in range(0, flat.shape[0], block):
        part = flat[start : start + block]
        if draw.kind == "normal":
            values = torch.randn(part.shape, generator=generator, device=part.device).mul_(spread)
        else:
            values = torch.rand(part.shape, generator=generator, device=part.device).sub_(0.5).mul_(2 * spread)
        if draw.slope:
            row = torch.arange(start, start + part.shape[0], device=part.device, dtype=torch.float32)
            values += draw.slope * row.unsqueeze(-1)
        part.copy_(values.add_(draw.centre))

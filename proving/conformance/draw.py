"""The tensors of a case: the same for the same seed, whichever process draws them and in whatever order."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from .case import RESIDUAL_OUT, Case, Y

# fp32 numbers that are drawn at once, before they are rounded to the tensor's own type.
_AT_ONCE = 1 << 26


class Draw(NamedTuple):
    """The source of the values of one tensor.

    Attributes:
        kind: "normal", or "uniform" between centre - spread and centre + spread.
        centre: the mean.
        spread: the standard deviation, or half the width.
        slope: added to the centre from one row to the next.
        over_2n: whether spread is divided by twice the row's length.
    """

    kind: str = "normal"
    centre: float = 0.0
    spread: float = 1.0
    slope: float = 0.0
    over_2n: bool = False


TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("suites.yaml").read_text())
# By name, a suite's way of drawing inputs; what is not said is standard normal.
INPUTS = {name: {tensor: Draw(**draw) for tensor, draw in tensors.items()} for name, tensors in TABLE["inputs"].items()}


def operands(case: Case, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor that the call takes, and the gradients that arrive, by name.

    Between rows that do not adjoin, and before the first, memory holds NaN: what reads it shows.
    """
    rows = {
        "x": case.x,
        "residual": case.residual,
        "gate": case.gate,
        "dy": (case.dy or case.y) if Y in case.arriving else None,
        "dresidual_out": case.residual if RESIDUAL_OUT in case.arriving else None,
    }
    names = ("weight", "bias", "x_bias", "smooth_scale", "next_weight", "next_bias")
    vectors = {name: getattr(case, name) for name in names}
    drawn = {}
    for name, dtype in (rows | vectors).items():
        if dtype is None:
            continue
        count, n, stride, offset = 1, case.channels or case.n, case.channels or case.n, 0
        if name in rows:
            count, n, stride, offset = case.rows, case.n, case.row_stride or case.n, case.offset
        memory = torch.full((offset + count * stride,), math.nan, dtype=dtype, device=device)
        tensor = memory[offset:].view(count, stride)[:, :n]
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{case.id} {name} {seed}".encode()))
        _fill(tensor, INPUTS[case.inputs].get(name, Draw()), generator)
        drawn[name] = tensor.view(case.shape) if name in rows else tensor[0]
    return drawn


def _fill(rows: torch.Tensor, draw: Draw, generator: torch.Generator) -> None:
    n = rows.shape[-1]
    spread = draw.spread / (2 * n) if draw.over_2n else draw.spread
    block = max(1, _AT_ONCE // n)
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        if draw.kind == "normal":
            values = torch.randn(part.shape, generator=generator, device=part.device).mul_(spread)
        else:
            values = torch.rand(part.shape, generator=generator, device=part.device).sub_(0.5).mul_(2 * spread)
        if draw.slope:
            row = torch.arange(start, start + len(part), device=part.device, dtype=torch.float32)
            values += draw.slope * row.unsqueeze(-1)
        part.copy_(values.add_(draw.centre))

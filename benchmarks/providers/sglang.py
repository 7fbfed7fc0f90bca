"""SGLang's Triton kernels of GroupNorm, of its pictures and videos: with SiLU, or with channels innermost."""

from __future__ import annotations

import torch

from ..cells import Cell, Task
from ..group_cells import GroupCell
from ..groups import EPS, Function, builders
from ..provider import Provider, load

_NORM = "sglang.kernels.ops.diffusion.norm"
_CONTIGUOUS, _CHANNELS_LAST = f"{_NORM}.group_norm_silu_triton", f"{_NORM}.group_norm_silu_twopass_triton"
# Channels innermost, of pictures alone and of so many channels at most, a power of two.
_MOST_CHANNELS = 2048
_PICTURE_DIMENSIONS = 4


def _function(cell: GroupCell) -> Function:
    # It takes no input of which a gradient could be asked for.
    @torch.no_grad()
    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if cell.channels_last:
            y: torch.Tensor = load(_CHANNELS_LAST).group_norm_silu_4d(x, weight, bias, cell.groups, EPS, cell.silu)
            return y
        whole: torch.Tensor = load(_CONTIGUOUS).triton_group_norm_silu(x, weight, bias, cell.groups, EPS)
        return whole

    return run


def _offers(cell: Cell) -> bool:
    if not isinstance(cell, GroupCell) or cell.task is not Task.GROUP:
        return False
    if not cell.channels_last:
        return cell.silu
    channels = cell.shape[1]
    return len(cell.shape) == _PICTURE_DIMENSIONS and channels <= _MOST_CHANNELS and not channels & (channels - 1)


PROVIDERS = (
    Provider(
        "sglang",
        "SGLang",
        (_CONTIGUOUS, _CHANNELS_LAST),
        builders(_function),
        distribution="sglang",
        offers=_offers,
    ),
)

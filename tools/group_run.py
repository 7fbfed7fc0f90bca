"""GroupNorm of groups of some length on random tensors, to be called again and again: what tiles are tried with."""

from __future__ import annotations

from typing import Any

import torch

from ..calls import group
from ..calls.group_instead import Gradients, Options
from ..codegen.groups import GroupMode
from ..codegen.instance import Tile
from ..dtypes import TORCH_DTYPES
from ..group_reference import group_norm, group_norm_bwd
from ..kernels.gpu import Target
from ..kernels.group_tiles import Shape, choose
from ..selection import dispatch
from .checked_run import Run
from .compare import Finding

_GROUPS = 32
_EPS = 1e-5
# Of a value, and of the mean magnitude of its tensor: two roundings of 16 bits, and sums of fp32.
_TOLERANCES = {2: 1.6e-2, 4: 1e-4}


def group_channels(n: int) -> int:
    """How many channels groups of n elements have here: as UNets' and VAEs', fewer where pictures are large."""
    return next(channels for channels in (4 if n > 2**17 else 8, 4, 2, 1) if n % channels == 0)


def fits(mode: GroupMode, n: int, tile: Tile, target: Target) -> bool:
    """Whether calls of such groups take a tile, rather than the one that stands in for it."""
    each = group_channels(n)
    shape = Shape(_GROUPS * each, _GROUPS, n // each, mode.dtype_in.itemsize)
    return choose(mode, shape, (tile,), target)[0] == tile


def prepare(mode: GroupMode, n: int, m: int, device: torch.device) -> Run[tuple[torch.Tensor | None, ...]]:
    """Make tensors of about m groups of n elements."""
    dtype, each = TORCH_DTYPES[mode.dtype_in], group_channels(n)
    shape = (max(1, m // _GROUPS), _GROUPS * each, n // each)

    def draw() -> torch.Tensor:
        made = torch.randn(shape, dtype=dtype, device=device)
        return made.movedim(1, -1).contiguous().movedim(-1, 1) if mode.channels_last else made

    x, dy = draw(), draw()
    weight, bias = (torch.randn(shape[1], dtype=dtype, device=device) for _ in range(2))
    options = Options(_GROUPS, _EPS, mode.activation.value, None)
    said: dict[str, Any] = {"eps": _EPS, "activation": mode.activation.value}
    if not mode.is_backward:
        return Run(
            entry=lambda: dispatch.find(mode, n),
            call=lambda: group.launched(x, weight, bias, options, saves=False)[:1],
            validate=lambda outputs: _compare(("y",), outputs, group_norm(x, _GROUPS, weight, bias, **said)),
            operands=(x, weight, bias),
        )
    _, statistics = group.launched(x, weight, bias, options, saves=True)
    assert statistics is not None
    return Run(
        entry=lambda: dispatch.find(mode, n),
        call=lambda: group.launched_backward(dy, x, weight, bias, statistics, options, Gradients._fields),
        validate=lambda gradients: _compare(
            Gradients._fields, gradients, group_norm_bwd(dy, x, _GROUPS, weight, bias, **said)
        ),
        operands=(x, dy, weight, bias),
    )


def _compare(
    names: tuple[str, ...], outputs: tuple[torch.Tensor | None, ...], expected: tuple[torch.Tensor | None, ...]
) -> tuple[Finding, ...]:
    found = []
    for name, got, want in zip(names, outputs, expected, strict=False):
        assert got is not None
        assert want is not None
        tolerance = _TOLERANCES[got.element_size()]
        allowed = tolerance * (want.abs() + want.abs().mean())
        error = (got.double() - want).abs()
        # Written so that a NaN fails.
        found.append(Finding(name, float(error.max()), float(allowed.max()), bool((error <= allowed).all())))
    return tuple(found)

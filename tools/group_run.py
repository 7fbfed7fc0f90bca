"""One problem of GroupNorm, or of a norm over channels: its kernel, compared with the fp64 reference and timed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch

from ..calls.outputs import LayerNormOutput
from ..calls.record import BackwardPass
from ..codegen.groups import GroupMode
from ..codegen.instance import Tile
from ..dtypes import TORCH_DTYPES
from ..families.group import row as group
from ..families.operands import GroupNormGradients, GroupOptions
from ..kernels.gpu import Target, target_of
from ..kernels.group_tiles import channel_tile, choose
from ..reference import grouped as group_reference
from ..reference.gradients import ReferenceGradients
from ..reference.norms import ReferenceOutput
from ..selection import dispatch
from .checked_run import REFERENCE_ELEMENTS
from .compare import Finding, compare, compare_gradients, worst_of
from .group_problem import GroupProblem
from .measured_run import Run
from .problem_tensors import SEED


def fits(mode: GroupMode, n: int, tile: Tile, target: Target) -> bool:
    """Return True if calls of groups of n elements run on this tile, and not on a substitute."""
    return choose(mode, GroupProblem.of_length(mode, n, 1).size, (tile,), target)[0] == tile


def prepare(problem: GroupProblem, device: torch.device) -> Run[tuple[torch.Tensor | None, ...]]:
    """Make a problem's tensors, so that it can be run on a device.

    Raises:
        NormforgeError: no kernel serves the problem.
    """
    mode, dtype = problem.mode, TORCH_DTYPES[problem.mode.dtype_in]
    generator = torch.Generator(device).manual_seed(SEED)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)

    def rows() -> torch.Tensor:
        if not mode.channels_last or len(problem.shape) == 2:
            return draw(*problem.shape)
        samples, channels, *space = problem.shape
        return draw(samples, *space, channels).movedim(-1, 1)

    x, dy = rows(), rows()
    weight, bias = draw(problem.shape[1]), draw(problem.shape[1]) if mode.span.centres else None
    out = None if problem.dtype_out is None else TORCH_DTYPES[problem.dtype_out]
    options = GroupOptions(problem.groups, problem.eps, mode.activation.value, out)
    arguments: dict[str, Any] = {"eps": problem.eps, "activation": mode.activation.value}

    def check(outputs: tuple[torch.Tensor | None, ...]) -> tuple[Finding, ...]:
        (y,) = outputs
        assert y is not None
        findings = []
        for some in _slices(problem):
            want = group_reference.group_norm(x[some], problem.groups, weight, bias, **arguments)
            got = LayerNormOutput(y[some], None, None, None, None)
            findings += compare(got, ReferenceOutput(want.to(out or dtype), None, None, None, None, want))
        return worst_of(findings)

    def names() -> tuple[str, str]:
        is_group, size, target = mode.span.is_group, problem.size, target_of(device)
        length = size.group_channels * size.positions
        entry = dispatch.find(mode, length)
        tiles = entry.choices(problem.rows, length, target.arch)
        tile = choose(mode, size, tiles, target)[0] if is_group else channel_tile(mode, size.channels)
        return entry.name, entry.kernel(tile.pipeline)

    if not mode.is_backward:
        return Run(
            names=names,
            call=lambda: group.launched(x, weight, bias, options, saves=False)[:1],
            validate=check,
            operands=(x, weight, bias),
        )
    _, statistics = group.launched(x, weight, bias, options, saves=True)
    call = BackwardPass((x, weight, bias, statistics), (options,), dy, None, (True, True, True))

    def check_gradients(gradients: tuple[torch.Tensor | None, ...]) -> tuple[Finding, ...]:
        parts = (
            group_reference.group_norm_bwd(dy[some], x[some], problem.groups, weight, bias, **arguments)
            for some in _slices(problem)
        )
        due = GroupNormGradients._fields[: 3 if mode.span.centres else 2]
        return tuple(compare_gradients(GroupNormGradients(*gradients), _together(parts), due))

    return Run(
        names=names,
        call=lambda: tuple(group.launched_backward(call)),
        validate=check_gradients,
        operands=(x, dy, weight, bias, statistics),
    )


def _slices(problem: GroupProblem) -> Iterator[slice]:
    """Yield slices of samples that fit the reference's memory."""
    some = max(1, REFERENCE_ELEMENTS // prod(problem.shape[1:]))
    for first in range(0, problem.shape[0], some):
        yield slice(first, first + some)


def _together(parts: Iterable[ReferenceGradients]) -> ReferenceGradients:
    """Join the gradients of slices of samples; gradients per channel are summed."""
    dx, dweight, dbias, sizes = zip(*(part[:4] for part in parts), strict=True)
    magnitudes = {name: torch.stack([each[name] for each in sizes]).sum(0) for name in ("dweight", "dbias")}
    magnitudes["dx"] = torch.cat([each["dx"] for each in sizes])
    of_bias = None if None in dbias else torch.stack(dbias).sum(0)
    return ReferenceGradients(torch.cat(dx), torch.stack(dweight).sum(0), of_bias, magnitudes)

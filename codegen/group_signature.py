"""The parameters of GroupNorm's kernels, in order, as one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .groups import GroupMode
from .values import Part, Pipeline


@dataclass(frozen=True)
class _Row:
    declaration: str
    comment: str
    wanted: Callable[[GroupMode, Pipeline | Part], bool] = lambda mode, part: True


def _in_parts(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part in (Pipeline.TWO_PASS, Part.MOMENTS, Part.TERMS)


def _writes(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part not in (Part.MOMENTS, Part.TERMS)


def _sums(mode: GroupMode, part: Pipeline | Part) -> bool:
    return mode.is_backward


def _spreads(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part is Pipeline.SPREAD


def _activates(mode: GroupMode, part: Pipeline | Part) -> bool:
    return mode.activation.is_applied and part is not Part.MOMENTS


_SHAPE = (
    _Row("units", "positions of a channel / ALIGNMENT"),
    _Row("first_item", "of this launch", lambda m, p: p is not Pipeline.SPREAD),
    _Row("part_tiles", "tiles a part, a multiple of HELD", _in_parts),
    _Row("items", "runs of WIDTH channels, in all samples", _spreads),
)
_CONSTANTS = (
    _Row("C: tl.constexpr", "channels"),
    _Row("CHANNELS: tl.constexpr", "of a group"),
    _Row("WIDTH: tl.constexpr", "channels of a program, whole groups"),
    _Row("BLOCK_C: tl.constexpr", "channels a tile"),
    _Row("BLOCK_S: tl.constexpr", "positions a tile"),
    _Row("HELD: tl.constexpr", "tiles in registers"),
    _Row("ALIGNMENT: tl.constexpr", "divides the positions"),
    _Row("FULL: tl.constexpr", "whether runs have no tile, and tiles no position, beyond the last"),
    _Row("ALIKE: tl.constexpr", "whether the tiles of a run have the same channels", _sums),
    _Row("PEERS: tl.constexpr", "parts, up to a power of two", lambda m, p: p in (Pipeline.TWO_PASS, Pipeline.SPREAD)),
    _Row("STAGES: tl.constexpr", "of the loop over items; more than 1 go by shared memory", _spreads),
    _Row("PTX: tl.constexpr", "whether the target runs PTX", _activates),
    # A cooperative launch has to find room for all of its programs at once.
    _Row(
        "PDL: tl.constexpr",
        "whether it is launched before the one ahead has ended",
        lambda m, p: p is not Pipeline.SPREAD,
    ),
)

_FORWARD = (
    _Row("x_ptr", "{rows} {dtype_in}"),
    _Row("weight_ptr", "(C,) or None", _writes),
    _Row("bias_ptr", "(C,) or None", _writes),
    _Row("partials_ptr", "(groups, 4, parts) fp32", _in_parts),
    _Row("exchange_ptr", "(groups, parts) int64, -1", _spreads),
    _Row("y_ptr", "x's shape", _writes),
    _Row("mean_ptr", "(groups,) fp32 or None", _writes),
    _Row("rstd_ptr", "(groups,) fp32 or None", _writes),
    *_SHAPE,
    _Row("eps", "fp32", _writes),
    *_CONSTANTS,
)

_BACKWARD = (
    _Row("dy_ptr", "x's shape"),
    _Row("x_ptr", "{rows} {dtype_in}"),
    _Row("weight_ptr", "(C,) or None"),
    _Row("bias_ptr", "(C,) or None", lambda m, p: m.activation.is_applied),
    _Row("mean_ptr", "(groups,) fp32"),
    _Row("rstd_ptr", "(groups,) fp32"),
    _Row("partials_ptr", "(groups, 2, parts) fp32", _in_parts),
    _Row("dx_ptr", "x's shape", _writes),
    _Row("dweight_ptr", "(sums, C) fp32 or None"),
    _Row("dbias_ptr", "(sums, C) fp32 or None"),
    *_SHAPE,
    *_CONSTANTS,
)


def group_params(mode: GroupMode, part: Pipeline | Part) -> list[tuple[str, str]]:
    """The parameters of one kernel, each with the comment that documents it; the runtime matches them by name."""
    rows = "(B, S, C)" if mode.channels_last else "(B, C, S)"
    table = _BACKWARD if mode.is_backward else _FORWARD
    return [
        (row.declaration, row.comment.format(rows=rows, dtype_in=mode.dtype_in.value))
        for row in table
        if row.wanted(mode, part)
    ]


# By whether gradients are computed.
_SUMMARIES: dict[tuple[bool, Pipeline | Part], str] = {
    (False, Pipeline.ONE_PASS): "Whole groups, held in registers.",
    (False, Part.MOMENTS): "The moments of a part of a group.",
    (False, Pipeline.TWO_PASS): "A part of a group, from the moments of all its parts.",
    (False, Pipeline.SPREAD): "Groups over several programs that exchange their moments.",
    (True, Pipeline.ONE_PASS): "Whole groups, held in registers.",
    (True, Part.TERMS): "What a part of a group adds to the sums that its gradients need.",
    (True, Pipeline.TWO_PASS): "A part of a group, from the sums of all its parts.",
}


def group_summary(mode: GroupMode, part: Pipeline | Part) -> str:
    """A kernel's docstring."""
    return _SUMMARIES[mode.is_backward, part]

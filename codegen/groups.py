"""GroupNorm: the modes of a family of its own, whose rows are groups of channels, and the parameters of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product

from .errors import IllegalCombinationError
from .model import INPUT_DTYPES, Direction, DType, Mode, Part, Pipeline

# The manifest's word on the axis `norm`, and how names of these modes start.
GROUP = "group"
_PREFIX = "gn"


class Activation(Enum):
    """What is applied to the normalised values; the value is the manifest's word."""

    NONE = "none"
    SILU = "silu"

    @property
    def is_applied(self) -> bool:
        """Whether there is one."""
        return self is not Activation.NONE


@dataclass(frozen=True)
class GroupMode:
    """One legal combination of GroupNorm's axes; the length of a group, its channels times positions, is the row's.

    Attributes:
        dtype_in: x's.
        direction: whether outputs or gradients are computed.
        activation: what is applied to the normalised values, and recomputed backward.
        channels_last: whether channels are innermost in memory, or positions.

    Raises:
        IllegalCombinationError: x is of a type that cannot be normalised.
    """

    dtype_in: DType
    direction: Direction = Direction.FORWARD
    activation: Activation = Activation.NONE
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.dtype_in not in INPUT_DTYPES:
            floats = ", ".join(dtype.value for dtype in INPUT_DTYPES)
            raise IllegalCombinationError(
                f"norm {GROUP} has no dtype_in {self.dtype_in.value}; use one of {floats}, or another norm"
            )

    @property
    def dtype_out(self) -> DType:
        """What y has where a call does not say otherwise."""
        return self.dtype_in

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.direction is Direction.BACKWARD

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipelines that there are kernels for."""
        found = (Pipeline.ONE_PASS, Pipeline.TWO_PASS, Pipeline.SPREAD)
        return found[:-1] if self.is_backward else found

    @cached_property
    def name(self) -> str:
        """The generated module's name and the stem of everything named after this mode."""
        activation = f"_{self.activation.value}" if self.activation.is_applied else ""
        layout = "_cl" if self.channels_last else ""
        return f"{_PREFIX}_{self.direction.value}_{self.dtype_in.value}{activation}{layout}"

    @property
    def title(self) -> str:
        """The norm and the input type, in prose."""
        return f"{self.dtype_in.value} GroupNorm {self.direction.title}"

    @property
    def features(self) -> tuple[str, ...]:
        """What this mode does beyond the bare norm, in prose."""
        silu = ("through SiLU" if self.is_backward else "SiLU applied",) if self.activation.is_applied else ()
        return (*silu, *(("channels last",) if self.channels_last else ()))

    @property
    def summary(self) -> str:
        """One line of prose: what a kernel of this mode does."""
        return ", ".join((self.title, *self.features))

    def kernel(self, part: Pipeline | Part) -> str:
        """The kernel's symbol: what a profiler shows."""
        return f"{self.name}_{part.value}"

    def parts(self, pipeline: Pipeline) -> tuple[Pipeline | Part, ...]:
        """The kernels that serve in a pipeline, in the order in which they are launched."""
        if pipeline is not Pipeline.TWO_PASS:
            return (pipeline,)
        return (Part.TERMS if self.is_backward else Part.MOMENTS, pipeline)


def group_modes() -> tuple[GroupMode, ...]:
    """Every mode there is."""
    return tuple(
        GroupMode(dtype, direction, activation, last)
        for direction, dtype, activation, last in product(Direction, INPUT_DTYPES, Activation, (False, True))
    )


# What an instance may be of.
AnyMode = Mode | GroupMode


def mode_named(name: str) -> AnyMode:
    """The mode of a name.

    Raises:
        IllegalCombinationError: no mode is called so.
    """
    found = next((mode for mode in group_modes() if mode.name == name), None)
    return Mode.from_name(name) if found is None else found


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
    return part in (Pipeline.ONE_PASS, Part.TERMS)


def _spreads(mode: GroupMode, part: Pipeline | Part) -> bool:
    return part is Pipeline.SPREAD


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
    _Row("PEERS: tl.constexpr", "parts, up to a power of two", lambda m, p: p in (Pipeline.TWO_PASS, Pipeline.SPREAD)),
    _Row("STAGES: tl.constexpr", "of the loop over items; more than 1 go by shared memory", _spreads),
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
    _Row("dweight_ptr", "(sums, C) fp32 or None", _sums),
    _Row("dbias_ptr", "(sums, C) fp32 or None", _sums),
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


_SUMMARIES: dict[tuple[Direction, Pipeline | Part], str] = {
    (Direction.FORWARD, Pipeline.ONE_PASS): "Whole groups, held in registers.",
    (Direction.FORWARD, Part.MOMENTS): "The moments of a part of a group.",
    (Direction.FORWARD, Pipeline.TWO_PASS): "A part of a group, from the moments of all its parts.",
    (Direction.FORWARD, Pipeline.SPREAD): "Groups over several programs that exchange their moments.",
    (Direction.BACKWARD, Pipeline.ONE_PASS): "Whole groups, held in registers.",
    (Direction.BACKWARD, Part.TERMS): "What a part of a group adds to the sums that its gradients need.",
    (Direction.BACKWARD, Pipeline.TWO_PASS): "A part of a group, from the sums of all its parts.",
}


def group_summary(mode: GroupMode, part: Pipeline | Part) -> str:
    """A kernel's docstring."""
    return _SUMMARIES[mode.direction, part]

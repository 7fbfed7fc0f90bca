"""The modes of GroupNorm, a family of its own whose rows are groups of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import product
from math import prod
from typing import ClassVar

from .errors import IllegalCombinationError
from .lazy import cached_property
from .model import Mode
from .values import (
    INPUT_DTYPES,
    Columnwise,
    Direction,
    DType,
    DyFormat,
    FusedAdd,
    FusedQuant,
    Norm,
    Part,
    Pipeline,
    Reduce,
    ScaleFormat,
)

# The manifest's word on the axis `norm`.
GROUP = "group"


class Activation(Enum):
    """The activation of the normalised values; the value is the manifest's word."""

    NONE = "none"
    SILU = "silu"

    @property
    def is_applied(self) -> bool:
        """Return True if there is an activation."""
        return self is not Activation.NONE


class Span(Enum):
    """The elements that share statistics; the value is the manifest's word."""

    GROUP = "group"  # a group of channels, at all positions
    CHANNELS = "channels"  # all channels of one position, as LayerNorm over them
    CHANNELS_RMS = "channels_rms"  # the same without a mean, as RMSNorm over them
    CHANNELS_L2 = "channels_l2"  # the same divided by the L2 norm of all channels
    CHANNELS_L2_CLAMPED = "channels_l2_clamped"  # or by eps if that is larger

    @classmethod
    def of(cls, num_groups: int) -> Span:
        """Return the span of a call of the operator, which passes 0 or less for a span of channels.

        Raises:
            IllegalCombinationError: num_groups is less.
        """
        if num_groups > 0:
            return cls.GROUP
        if -num_groups >= len(_CHANNEL_SPANS):
            raise IllegalCombinationError(
                f"num_groups is {num_groups}; it takes 1 or more, or for norms of channels 0 (LayerNorm), -1 "
                "(RMSNorm), -2 (L2 norm) or -3 (L2 norm of at least eps)"
            )
        return _CHANNEL_SPANS[-num_groups]

    @classmethod
    def over(cls, norm: Norm) -> Span:
        """Return the span of a norm of channels."""
        return next(span for span in _CHANNEL_SPANS if span.norm is norm)

    @property
    def num_groups(self) -> int:
        """Return what calls pass as num_groups for a span of channels."""
        return -_CHANNEL_SPANS.index(self)

    @property
    def is_group(self) -> bool:
        """Return True if a group of channels shares statistics at all positions."""
        return self is Span.GROUP

    @property
    def norm(self) -> Norm:
        """Return the norm of the elements."""
        return _NORMS.get(self, Norm.LAYER)

    @property
    def centres(self) -> bool:
        """Return True if the mean is subtracted."""
        return self.norm.centres

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of modules and kernels."""
        return "gn" if self.is_group else f"c{self.norm.prefix}"


_CHANNEL_SPANS = tuple(span for span in Span if not span.is_group)
_NORMS = {Span.CHANNELS_RMS: Norm.RMS, Span.CHANNELS_L2: Norm.L2, Span.CHANNELS_L2_CLAMPED: Norm.L2_CLAMPED}


@dataclass(frozen=True)
class GroupMode:
    """One legal combination of GroupNorm's axes. The row length is that of a group: its channels times positions.

    With a span of channels a row is one position of one sample, and its length is the number of channels. Rows with
    channels innermost and no activation are for the norms of rows: `Mode`.

    Attributes:
        dtype_in: the dtype of x.
        direction: whether kernels compute outputs or gradients.
        activation: the activation of the normalised values, recomputed in the backward pass.
        channels_last: True if channels are innermost in memory, False if positions are.
        span: the elements that share statistics.

    Raises:
        IllegalCombinationError: x has a dtype that cannot be normalised, or the span has no kernels of the other axes.
    """

    dtype_in: DType
    direction: Direction = Direction.FORWARD
    activation: Activation = Activation.NONE
    channels_last: bool = False
    span: Span = Span.GROUP

    # Attributes that rows of `parameters` and JAX's operations read from the modes of every family.
    norm: ClassVar[Norm] = Norm.LAYER
    fadd: ClassVar[FusedAdd] = FusedAdd.NONE
    fquant: ClassVar[FusedQuant] = FusedQuant.NONE
    statistics_only: ClassVar[bool] = False
    serves: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    dropout: ClassVar[bool] = False
    reduce: ClassVar[Reduce] = Reduce.NONE
    columnwise: ClassVar[Columnwise] = Columnwise.NONE
    has_scale_strides: ClassVar[bool] = False
    scale_format: ClassVar[ScaleFormat] = ScaleFormat.FLOAT
    dy_format: ClassVar[DyFormat] = DyFormat.FLOAT

    def __post_init__(self) -> None:
        if self.dtype_in not in INPUT_DTYPES:
            floats = ", ".join(dtype.value for dtype in INPUT_DTYPES)
            raise IllegalCombinationError(
                f"norm {GROUP} has no dtype_in {self.dtype_in.value}; use one of {floats}, or another norm"
            )
        if not self.span.is_group and self.channels_last and not self.activation.is_applied:
            raise IllegalCombinationError(
                f"span {self.span.value} with channels_last and no activation is a norm of rows; leave channels_last "
                f"out, use activation silu, or norm {self.span.norm.value}"
            )

    @property
    def dtype_out(self) -> DType:
        """Return the dtype of y where a call does not name one."""
        return self.dtype_in

    @property
    def is_backward(self) -> bool:
        """Return True if kernels compute gradients."""
        return self.direction is Direction.BACKWARD

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Return the pipelines that have kernels."""
        return (Pipeline.ONE_PASS, Pipeline.TWO_PASS)

    @cached_property
    def name(self) -> str:
        """Return the generated module's name, from which all other names of this mode are made."""
        activation = f"_{self.activation.value}" if self.activation.is_applied else ""
        layout = "_cl" if self.channels_last else ""
        return f"{self.span.prefix}_{self.direction.value}_{self.dtype_in.value}{activation}{layout}"

    def takes(self, channels: int, space: Sequence[int]) -> bool:
        """Return True if calls whose x is (B, channels, *space) have this layout.

        An x that is both contiguous and channels_last counts as one of the two.
        """
        if not space:
            return self.channels_last
        return not self.channels_last or (channels > 1 and prod(space) > 1)

    def kernel(self, part: Pipeline | Part) -> str:
        """Return the kernel's symbol, which profilers show."""
        return f"{self.name}_{part.value}"

    def parts(self, pipeline: Pipeline) -> tuple[Pipeline | Part, ...]:
        """Return the kernels that serve in a pipeline, in launch order."""
        if pipeline is not Pipeline.TWO_PASS:
            return (pipeline,)
        if not self.span.is_group:
            return (Part.ROW_TERMS, pipeline) if self.is_backward else (pipeline,)
        merge = (Part.MERGE,) if self.channels_last else ()
        return (Part.TERMS if self.is_backward else Part.MOMENTS, *merge, pipeline)


@cache
def group_modes() -> tuple[GroupMode, ...]:
    """Return every mode of GroupNorm, and of norms over the channels of each position."""
    return tuple(
        GroupMode(dtype, direction, activation, last, span)
        for direction, dtype, activation, last, span in product(
            Direction, INPUT_DTYPES, Activation, (False, True), Span
        )
        if span.is_group or activation.is_applied or not last
    )


# The mode of an instance.
AnyMode = Mode | GroupMode


def mode_named(name: str) -> AnyMode:
    """Return the mode of a name.

    Raises:
        IllegalCombinationError: no mode has the name.
    """
    mode = next((mode for mode in group_modes() if mode.name == name), None)
    return Mode.from_name(name) if mode is None else mode

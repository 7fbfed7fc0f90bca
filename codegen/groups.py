"""The modes of GroupNorm, a family of its own whose rows are groups of channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from math import prod
from typing import ClassVar

from .errors import IllegalCombinationError
from .lazy import cached_property
from .model import Mode
from .values import INPUT_DTYPES, Direction, DType, Norm, Part, Pipeline, ScaleFormat

# The manifest's word on the axis `norm`, and the prefix of these modes' names.
GROUP = "group"
_PREFIX = "gn"


class Activation(Enum):
    """The activation of the normalised values; the value is the manifest's word."""

    NONE = "none"
    SILU = "silu"

    @property
    def is_applied(self) -> bool:
        """Return True if there is an activation."""
        return self is not Activation.NONE


@dataclass(frozen=True)
class GroupMode:
    """One legal combination of GroupNorm's axes. The row length is that of a group: its channels times positions.

    Attributes:
        dtype_in: the dtype of x.
        direction: whether kernels compute outputs or gradients.
        activation: the activation of the normalised values, recomputed in the backward pass.
        channels_last: True if channels are innermost in memory, False if positions are.

    Raises:
        IllegalCombinationError: x has a dtype that cannot be normalised.
    """

    dtype_in: DType
    direction: Direction = Direction.FORWARD
    activation: Activation = Activation.NONE
    channels_last: bool = False

    # Attributes that rows of `parameters` read from the modes of every family.
    norm: ClassVar[Norm] = Norm.LAYER
    serves: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    dropout: ClassVar[bool] = False
    has_scale_strides: ClassVar[bool] = False
    scale_format: ClassVar[ScaleFormat] = ScaleFormat.FLOAT

    def __post_init__(self) -> None:
        if self.dtype_in not in INPUT_DTYPES:
            floats = ", ".join(dtype.value for dtype in INPUT_DTYPES)
            raise IllegalCombinationError(
                f"norm {GROUP} has no dtype_in {self.dtype_in.value}; use one of {floats}, or another norm"
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
        pipelines = (Pipeline.ONE_PASS, Pipeline.TWO_PASS, Pipeline.SPREAD)
        return pipelines[:-1] if self.is_backward else pipelines

    @cached_property
    def name(self) -> str:
        """Return the generated module's name, from which all other names of this mode are made."""
        activation = f"_{self.activation.value}" if self.activation.is_applied else ""
        layout = "_cl" if self.channels_last else ""
        return f"{_PREFIX}_{self.direction.value}_{self.dtype_in.value}{activation}{layout}"

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
        return (Part.TERMS if self.is_backward else Part.MOMENTS, pipeline)


def group_modes() -> tuple[GroupMode, ...]:
    """Return every GroupNorm mode."""
    return tuple(
        GroupMode(dtype, direction, activation, last)
        for direction, dtype, activation, last in product(Direction, INPUT_DTYPES, Activation, (False, True))
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

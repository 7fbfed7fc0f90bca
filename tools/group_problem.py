"""One problem of GroupNorm. Imports no torch, so that help and refusals take no seconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ..codegen.groups import GROUP, GroupMode
from ..codegen.values import DType
from ..kernels.group_tiles import Shape
from .problem import WORDS

DEFAULT_EPS = 1e-5

# Elements of a group and their channels: of a Stable Diffusion UNet at 8, 16, 32 and 64 squared, and of its VAE at 512.
LENGTHS = {2560: 40, 10240: 40, 20480: 20, 40960: 10, 2**20: 4}

# Where nothing else is asked for: of a Stable Diffusion UNet, and how many groups those have.
SHAPE, GROUPS = (2, 320, 64, 64), 32


@dataclass(frozen=True)
class GroupProblem:
    """What to run.

    Attributes:
        mode: what is computed; weight and bias are of its dtype_in.
        shape: x's.
        groups: of a sample.
        eps: added to the variance.
        dtype_out: y's; None is x's.
    """

    mode: GroupMode
    shape: tuple[int, ...] = SHAPE
    groups: int = GROUPS
    eps: float = DEFAULT_EPS
    dtype_out: DType | None = None

    @classmethod
    def of_length(cls, mode: GroupMode, n: int, m: int) -> GroupProblem:
        """About m groups of n elements."""
        each = _channels(n)
        return cls(mode, (max(1, m // GROUPS), GROUPS * each, n // each))

    @property
    def size(self) -> Shape:
        """What counts for tiles."""
        return Shape(self.shape[1], self.groups, prod(self.shape[2:]), self.mode.dtype_in.itemsize)

    @property
    def rows(self) -> int:
        """How many groups there are in all samples."""
        return self.shape[0] * self.groups

    @property
    def sizes(self) -> str:
        """The shape, in prose."""
        return "x".join(map(str, self.shape))

    @property
    def words(self) -> dict[str, Any]:
        """The problem as JSON has it."""
        return {
            "norm": GROUP,
            "shape": list(self.shape),
            "groups": self.groups,
            "channels_last": self.mode.channels_last,
            "activation": self.mode.activation.value,
            WORDS["dtype_in"]: self.mode.dtype_in.value,
            WORDS["dtype_out"]: (self.dtype_out or self.mode.dtype_in).value,
            "backward": self.mode.is_backward,
            "eps": self.eps,
        }


def _channels(n: int) -> int:
    """How many channels groups of n elements have here: as UNets' and VAEs', fewer where pictures are large."""
    if n in LENGTHS:
        return LENGTHS[n]
    return next(channels for channels in (4 if n > 2**17 else 8, 4, 2, 1) if n % channels == 0)

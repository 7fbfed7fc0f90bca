"""One problem of GroupNorm, or of a norm over channels, and the arguments of `normforge run`. Imports no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from ..codegen import prose
from ..codegen.groups import GROUP, Activation, GroupMode, Span
from ..codegen.values import Direction, DType, Norm
from ..kernels.group_tiles import Shape
from .problem import DEFAULT_EPS as EPS_OF
from .problem import WORDS

DEFAULT_EPS = 1e-5

# Elements of a group and their channels: of a Stable Diffusion UNet at 8, 16, 32 and 64 squared, and of its VAE at 512.
LENGTHS = {2560: 40, 10240: 40, 20480: 20, 40960: 10, 2**20: 4}

# The defaults: a shape of a Stable Diffusion UNet, and its number of groups.
SHAPE, GROUPS = (2, 320, 64, 64), 32

LAYOUTS = {"contiguous": False, "channels_last": True}

# Options that only GroupNorm has, options of images, and options that these share with other norms.
OWN = ("shape", "layout", "groups")
_SHARED = (
    "shape",
    "layout",
    "norm",
    "prec_i",
    "prec_o",
    "activation",
    "bwd",
    "e",
    "v",
    "kname",
    "warmup",
    "repeat",
    "json",
    "jsonfile",
)


@dataclass(frozen=True)
class GroupProblem:
    """A problem of GroupNorm, or of a norm over channels, to run.

    Attributes:
        mode: what is computed; weight and bias are of its dtype_in.
        shape: x's.
        groups: of a sample; what `Span.num_groups` returns for a norm over channels.
        eps: added to the variance.
        dtype_out: y's; None is x's.
    """

    mode: GroupMode
    shape: tuple[int, ...] = SHAPE
    groups: int = GROUPS
    eps: float = DEFAULT_EPS
    dtype_out: DType | None = None

    # The argument that makes a problem smaller.
    smaller: ClassVar[str] = "-shape (-shape 1x64x16x16, say)"

    @classmethod
    def of_length(cls, mode: GroupMode, n: int, m: int) -> GroupProblem:
        """About m groups of n elements."""
        each = _channels(n)
        return cls(mode, (max(1, m // GROUPS), GROUPS * each, n // each))

    @property
    def size(self) -> Shape:
        """The sizes that tiles are chosen by."""
        return Shape(self.shape[1], max(self.groups, 1), prod(self.shape[2:]), self.mode.dtype_in.itemsize)

    @property
    def rows(self) -> int:
        """How many groups there are in all samples; of a norm over channels, how many samples."""
        return self.shape[0] * max(self.groups, 1)

    @property
    def sizes(self) -> str:
        """The shape, in prose."""
        return "x".join(map(str, self.shape))

    @property
    def elements(self) -> int:
        """How many elements x has."""
        return prod(self.shape)

    @property
    def headline(self) -> str:
        """The problem, in prose."""
        out = self.dtype_out or self.mode.dtype_in
        dtypes = f"{self.mode.dtype_in.value} " + ("backward" if self.mode.is_backward else f"-> {out.value}")
        span = self.mode.span
        title, where = (f"{GROUP.title()}Norm", f" in {self.groups} groups")
        if not span.is_group:
            title, where = f"{span.norm.row.title} over channels", ""
        return f"{title} {dtypes}, {self.sizes}{', '.join((where, *prose.features(self.mode)))}"

    @property
    def words(self) -> dict[str, Any]:
        """The problem as JSON has it."""
        return {
            "norm": GROUP if self.mode.span.is_group else self.mode.span.norm.value,
            "shape": list(self.shape),
            "groups" if self.mode.span.is_group else "dim": max(self.groups, 1),
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


def group_problem(
    args: argparse.Namespace, defaults: Mapping[str, Any], dtypes: Mapping[str, DType], auto: str
) -> GroupProblem:
    """Return the problem that parsed arguments ask for.

    Args:
        args: the arguments.
        defaults: of every option.
        dtypes: what x and y may be, by their words.
        auto: the word that leaves a type or an activation open.

    Raises:
        ValueError: GroupNorm has no such option, word or size.
    """
    span = Span.GROUP if args.norm == GROUP else Span.over(Norm(args.norm))
    asked, own = (f"-norm {GROUP}", "groups") if span.is_group else ("-dim 1", "dim")
    refuse_unread(args, defaults, (own, *_SHARED), f"{asked} takes {listed((own, *_SHARED))}")
    for name in ("prec_i", "prec_o"):
        word = getattr(args, name)
        if word not in dtypes and not (name == "prec_o" and word == auto):
            raise ValueError(f"-{name} {word} does not go with {asked}; pass one of {', '.join(dtypes)}")
    if args.bwd and args.prec_o != auto:
        raise ValueError(
            f"-prec_o {args.prec_o} does not go with -bwd 1: gradients are of the types of what they belong to"
        )
    activations = {activation.value: activation for activation in Activation}
    word = Activation.NONE.value if args.activation == auto else args.activation
    if word not in activations:
        raise ValueError(f"-activation {word} does not go with {asked}; pass one of {', '.join(activations)}")
    mode = GroupMode(
        dtypes[args.prec_i],
        Direction.BACKWARD if args.bwd else Direction.FORWARD,
        activations[word],
        LAYOUTS[args.layout],
        span,
    )
    shape = _shape(args.shape)
    if span.is_group and (args.groups < 1 or shape[1] % args.groups):
        raise ValueError(f"-groups {args.groups} does not divide the {shape[1]} channels of -shape {args.shape}")
    if not mode.takes(shape[1], shape[2:]):
        other = next(name for name, last in LAYOUTS.items() if last is not mode.channels_last)
        raise ValueError(f"-shape {args.shape} lies in memory as -layout {other} does: pass that")
    groups, default = (args.groups, DEFAULT_EPS) if span.is_group else (span.num_groups, EPS_OF[span.norm])
    eps = default if args.e is None else args.e
    return GroupProblem(mode, shape, groups, eps, None if args.prec_o == auto else dtypes[args.prec_o])


def refuse_unread(args: argparse.Namespace, defaults: Mapping[str, Any], read: Collection[str], reason: str) -> None:
    """Refuse options that were given and are not read.

    Raises:
        ValueError: there is one.
    """
    for name, default in defaults.items():
        value = getattr(args, name)
        if name not in read and value != default:
            raise ValueError(f"-{name} {value} would be ignored: {reason}; leave it out")


def listed(names: Collection[str]) -> str:
    """Return options as they are written."""
    return ", ".join(f"-{name}" for name in names)


def _shape(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text) is None:
        raise ValueError(f"-shape {text} is no shape; write the sizes of (B, C, ...) as 2x320x64x64")
    return tuple(map(int, text.split("x")))

"""One problem of norms of heads with their rotary embedding, and the arguments that ask for it. Imports no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..codegen.values import ACROSS_HEADS, Cast, DType, HeadNorm, Norm
from .group_problem import listed, refuse_unread
from .problem import DEFAULT_EPS, WORDS, Problem

NO_CACHE = "none"
# Options that only these norms have, and options that they share with other norms.
_OF_CACHES = ("slots", "k_scale")
OWN = (
    *("q_heads", "k_heads", "rotary_dim", "interleaved", "across_heads", "positions", "mrope_section"),
    *("mrope_interleaved", "key_cache", *_OF_CACHES),
)
# The types of the keys' cache: no cache, the type of keys, or fp8.
CACHES = (NO_CACHE, "auto", "fp8")
_READ = (
    *("rope", *OWN, "m", "n", "norm", "prec_i", "e", "cast", "bwd", "v", "kname", "warmup", "repeat", "json"),
    "jsonfile",
)


@dataclass(frozen=True)
class RotaryProblem:
    """A problem of `qk_norm_rope` to run.

    Attributes:
        m: tokens.
        n: columns of a head.
        q_heads: of a token.
        k_heads: of a token; 0 is queries alone.
        rotary_dim: how many columns are rotated.
        norm: of each head, or of all heads of a token.
        dtype_in: of q, k and both weights.
        interleaved: whether the columns of a pair adjoin.
        cast: whether rows are rounded before the weight.
        backward: whether gradients are computed instead.
        eps: of the norm.
        positions: the number of positions that a token has: none, one or three.
        section: how many pairs turn by each of three positions; None if there are not as many.
        alternates: whether pairs take the three positions in turn.
        cache: the dtype of a paged cache that keys are written to too; None without one.
        slots: of a block of the cache.
        k_scale: what keys are divided by for an fp8 cache; 0 for nothing.
    """

    m: int
    n: int
    q_heads: int
    k_heads: int
    rotary_dim: int
    norm: HeadNorm
    dtype_in: DType
    interleaved: bool
    cast: Cast
    backward: bool
    eps: float
    positions: int
    section: tuple[int, ...] | None
    alternates: bool
    cache: DType | None
    slots: int
    k_scale: float

    # The argument that makes a problem smaller.
    smaller: ClassVar[str] = Problem.smaller

    @property
    def elements(self) -> int:
        """How many elements q and k have."""
        return self.m * (self.q_heads + self.k_heads) * self.n

    @property
    def sizes(self) -> str:
        """The sizes, in prose."""
        return f"m={self.m} n={self.n} q_heads={self.q_heads} k_heads={self.k_heads}"

    @property
    def headline(self) -> str:
        """The problem, in prose."""
        across = " across heads" * self.norm.is_across
        dtypes = f"{self.dtype_in.value} " + ("backward" if self.backward else f"-> {self.dtype_in.value}")
        rotated = f"{self.rotary_dim} columns rotated{' in adjoining pairs' * self.interleaved}"
        rotated += f" by {self.positions} positions of each token" * (self.positions > 0)
        cached = "" if self.cache is None else f", keys cached in {self.cache.value} by blocks of {self.slots} slots"
        return f"{self.norm.norm.row.title}{across} with RoPE {dtypes}, {self.sizes}, {rotated}{cached}"

    @property
    def words(self) -> dict[str, Any]:
        """The problem as JSON has it."""
        return {
            "rope": 1,
            "m": self.m,
            "n": self.n,
            "q_heads": self.q_heads,
            "k_heads": self.k_heads,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "norm": self.norm.norm.value,
            "across_heads": self.norm.is_across,
            WORDS["dtype_in"]: self.dtype_in.value,
            "cast": self.cast.value,
            "backward": self.backward,
            "eps": self.eps,
            "positions": self.positions,
            "mrope_section": self.section,
            "mrope_interleaved": self.alternates,
            "key_cache": NO_CACHE if self.cache is None else self.cache.value,
            "slots": self.slots,
            "k_scale": self.k_scale,
        }


def rotary_problem(args: argparse.Namespace, defaults: Mapping[str, Any], dtypes: Mapping[str, DType]) -> RotaryProblem:
    """Return the problem that parsed arguments ask for.

    Args:
        args: the arguments.
        defaults: of every option.
        dtypes: what q and k may be, by their words.

    Raises:
        ValueError: norms of heads have no such option, word or size.
    """
    refuse_unread(args, defaults, _READ, f"-rope 1 takes {listed(_READ)}")
    norms = [norm.norm.value for norm in HeadNorm if not norm.is_across]
    for name, fitting in (("norm", norms), ("prec_i", dtypes)):
        word = getattr(args, name)
        if word not in fitting:
            raise ValueError(f"-{name} {word} does not go with -rope 1; pass one of {', '.join(fitting)}")
    caches = args.key_cache != NO_CACHE
    for name, least in (("q_heads", 1), ("k_heads", int(caches)), ("slots", 1), ("k_scale", 0)):
        if not least <= getattr(args, name) < math.inf:
            raise ValueError(f"-{name} {getattr(args, name)} will not do; it takes a number of at least {least}")
    if caches and args.bwd:
        raise ValueError(f"-key_cache {args.key_cache} does not go with -bwd 1: gradients go to no cache; leave it out")
    of_caches = {name: defaults[name] for name in _OF_CACHES}
    read = {NO_CACHE: (), "auto": ("slots",)}.get(args.key_cache, _OF_CACHES)
    refuse_unread(args, of_caches, read, "-slots goes with a -key_cache, and -k_scale with -key_cache fp8")
    columns = args.n if args.rotary_dim == defaults["rotary_dim"] else args.rotary_dim
    if columns % 2 or not 2 <= columns <= args.n:
        raise ValueError(f"-rotary_dim {columns} will not do; it takes an even number from 2 to -n {args.n}")
    section = None
    if args.mrope_section is not None:
        section = tuple([int(each) for each in args.mrope_section.split(",") if each.isdecimal()])
    if section is not None and (len(section) != 3 or 2 * sum(section) != columns):
        takes = f"three numbers that add up to {columns // 2}, half of the rotated columns"
        raise ValueError(f"-mrope_section {args.mrope_section} will not do; it takes {takes}")
    return RotaryProblem(
        args.m,
        args.n,
        args.q_heads,
        args.k_heads,
        columns,
        HeadNorm(f"{args.norm}{ACROSS_HEADS * args.across_heads}"),
        dtypes[args.prec_i],
        bool(args.interleaved),
        Cast(args.cast),
        bool(args.bwd),
        DEFAULT_EPS[Norm(args.norm)] if args.e is None else args.e,
        args.positions if section is None else len(section),
        section,
        bool(args.mrope_interleaved),
        {NO_CACHE: None, "auto": dtypes[args.prec_i]}.get(args.key_cache, DType.FP8_E4M3FN),
        args.slots,
        args.k_scale,
    )

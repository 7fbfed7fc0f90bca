"""The arguments of `normforge run -norm group`, and what they resolve to."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..codegen.groups import GROUP, Activation, GroupMode
from ..codegen.values import Direction, DType
from .group_problem import DEFAULT_EPS, GroupProblem

LAYOUTS = {"contiguous": False, "channels_last": True}

# Those that only GroupNorm has, and those that it has beside other norms.
OWN = ("shape", "groups", "layout")
_SHARED = ("norm", "prec_i", "prec_o", "activation", "bwd", "e", "v", "kname", "warmup", "repeat", "json", "jsonfile")


def group_problem(
    given: argparse.Namespace, defaults: Mapping[str, Any], dtypes: Mapping[str, DType], auto: str
) -> GroupProblem:
    """What parsed arguments ask for.

    Args:
        given: the arguments.
        defaults: of every option.
        dtypes: what x and y may be, by their words.
        auto: the word that leaves a type or an activation open.

    Raises:
        ValueError: they ask for what there is not.
    """
    refuse_unread(given, defaults, (*OWN, *_SHARED), f"-norm {GROUP} takes {_listed((*OWN, *_SHARED))}")
    for name in ("prec_i", "prec_o"):
        word = getattr(given, name)
        if word not in dtypes and not (name == "prec_o" and word == auto):
            raise ValueError(f"-{name} {word} does not go with -norm {GROUP}; pass one of {', '.join(dtypes)}")
    if given.bwd and given.prec_o != auto:
        raise ValueError(
            f"-prec_o {given.prec_o} does not go with -bwd 1: gradients are of the types of what they belong to"
        )
    activations = {activation.value: activation for activation in Activation}
    word = Activation.NONE.value if given.activation == auto else given.activation
    if word not in activations:
        raise ValueError(f"-activation {word} does not go with -norm {GROUP}; pass one of {', '.join(activations)}")
    mode = GroupMode(
        dtypes[given.prec_i],
        Direction.BACKWARD if given.bwd else Direction.FORWARD,
        activations[word],
        LAYOUTS[given.layout],
    )
    shape = _shape(given.shape)
    if given.groups < 1 or shape[1] % given.groups:
        raise ValueError(f"-groups {given.groups} does not divide the {shape[1]} channels of -shape {given.shape}")
    if not mode.takes(shape[1], shape[2:]):
        other = next(name for name, last in LAYOUTS.items() if last is not mode.channels_last)
        raise ValueError(f"-shape {given.shape} lies in memory as -layout {other} does: pass that")
    eps = DEFAULT_EPS if given.e is None else given.e
    return GroupProblem(mode, shape, given.groups, eps, None if given.prec_o == auto else dtypes[given.prec_o])


def refuse_unread(given: argparse.Namespace, defaults: Mapping[str, Any], read: Collection[str], reason: str) -> None:
    """Refuse options that were given and are not read.

    Raises:
        ValueError: there is one.
    """
    for name, default in defaults.items():
        value = getattr(given, name)
        if name not in read and value != default:
            raise ValueError(f"-{name} {value} would be ignored: {reason}; leave it out")


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"-{name}" for name in names)


def _shape(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text) is None:
        raise ValueError(f"-shape {text} is no shape; write the sizes of (B, C, ...) as 2x320x64x64")
    return tuple(map(int, text.split("x")))

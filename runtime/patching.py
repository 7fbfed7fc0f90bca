"""Swapping the norms of a model for ours, in place, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import huggingface
from .dtypes import FLOATS
from .huggingface import CastOrder, T5RMSNorm
from .modules import LayerNorm, RMSNorm

__all__ = ["Patch", "Skipped", "Swapped", "patch", "unpatch"]


class Swapped(NamedTuple):
    """A module whose class was changed.

    Attributes:
        path: where it stands in the model; for a module that stands in several places, the first.
        old: the class it had.
        new: the class it has.
    """

    path: str
    old: type[torch.nn.Module]
    new: type[torch.nn.Module]


class Skipped(NamedTuple):
    """A norm that was left as it is.

    Attributes:
        path: where it stands in the model; the first of several places.
        cls: its class.
        reason: why it was not swapped.
    """

    path: str
    cls: type[torch.nn.Module]
    reason: str


class Patch(NamedTuple):
    """What `patch` did.

    Attributes:
        swapped: the modules that are ours now.
        skipped: the modules that look like norms and are not ours.
    """

    swapped: tuple[Swapped, ...]
    skipped: tuple[Skipped, ...]


# Where a swapped module keeps what unpatch needs; deep copies and pickles carry it along.
_ORIGINAL = "_normforge_original"

_TORCH: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.RMSNorm: RMSNorm,
}

_HUGGING_FACE: dict[CastOrder, type[RMSNorm]] = {
    CastOrder.TO_INPUT_BEFORE_WEIGHT: RMSNorm,
    CastOrder.TO_WEIGHT_BEFORE_WEIGHT: T5RMSNorm,
    CastOrder.AFTER_WEIGHT: RMSNorm,
}


@dataclass(frozen=True)
class _Replacement:
    """The class a module is to have, and the attributes that class reads and the module lacks."""

    cls: type[torch.nn.Module]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _Original:
    """The class a module had, the names of the attributes it was given, and the values it had under them."""

    cls: type[torch.nn.Module]
    given: tuple[str, ...]
    had: dict[str, Any]


def patch(model: torch.nn.Module, *, cast_before_weight: bool = True) -> Patch:
    """Swap every norm in a model that normforge computes for `LayerNorm` or `RMSNorm`, in place.

    A module keeps its identity and everything in it: only its class changes. So parameters stay the same objects
    (optimisers keep working), hooks stay registered, a module shared by several parents is swapped for all of them,
    and state_dicts do not change.

    Swapped are `torch.nn.LayerNorm` and `torch.nn.RMSNorm`, and classes whose name ends in RMSNorm or T5LayerNorm,
    with a 1-D weight, no bias, and `variance_epsilon` or `eps`, if their forward computes one of Hugging Face's
    formulas: as `LlamaRMSNorm`, `T5LayerNorm` or `Olmo2RMSNorm`. Which one is found by trying a copy on random numbers.
    Anything else that looks like a norm, a subclass with a forward of its own, say, is left alone and reported.

    Args:
        model: any module, also a norm itself.
        cast_before_weight: whether norms that round before they multiply by the weight (Llama's and T5's) keep doing
            so. False has the kernel multiply in fp32 and round once: less time and memory, and results that differ
            by a rounding; a Llama norm then returns its input's dtype.

    Returns:
        What was swapped and what was skipped.
    """
    swapped, skipped = [], []
    for path, module in model.named_modules():
        old = type(module)
        if not _looks_like_a_norm(module):
            continue
        replacement = _replacement(module, cast_before_weight)
        if isinstance(replacement, str):
            skipped.append(Skipped(path, old, replacement))
        else:
            _swap(module, replacement)
            swapped.append(Swapped(path, old, replacement.cls))
    return Patch(tuple(swapped), tuple(skipped))


def unpatch(model: torch.nn.Module) -> tuple[Swapped, ...]:
    """Undo `patch`: every module that it swapped gets its class and attributes back. Others are left alone.

    Args:
        model: what was patched, a part of it, or a copy.

    Returns:
        What was swapped back.
    """
    swapped = []
    for path, module in model.named_modules():
        original = vars(module).pop(_ORIGINAL, None)
        if original is not None:
            swapped.append(Swapped(path, type(module), original.cls))
            for name in original.given:
                vars(module).pop(name, None)
            vars(module).update(original.had)
            module.__class__ = original.cls
    return tuple(swapped)


def _looks_like_a_norm(module: torch.nn.Module) -> bool:
    """Whether a user would expect patch to say something about a module; ours are done."""
    cls = type(module)
    if cls.__module__.partition(".")[0] == __package__:
        return False
    return isinstance(module, tuple(_TORCH)) or any(name in cls.__name__ for name in ("RMSNorm", "LayerNorm"))


def _replacement(module: torch.nn.Module, cast_before_weight: bool) -> _Replacement | str:
    """What a module becomes, or why nothing."""
    cls = type(module)
    if "forward" in vars(module):
        return "its forward is overridden on the instance"
    dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
    if not dtypes <= set(FLOATS):
        return f"it has parameters in {', '.join(map(str, dtypes))}, and kernels take {', '.join(map(str, FLOATS))}"
    if cls in _TORCH:
        return _Replacement(_TORCH[cls], {})
    if isinstance(module, tuple(_TORCH)):
        return f"{cls.__name__} is a subclass of torch's, and its forward may be its own"
    if not cls.__name__.endswith(("RMSNorm", "T5LayerNorm")):
        return f"{cls.__name__} is no class that patch knows"
    return _hugging_face(module, cast_before_weight)


def _hugging_face(module: torch.nn.Module, cast_before_weight: bool) -> _Replacement | str:
    eps = huggingface.epsilon(module)
    if eps is None:
        return "it lacks a 1-D weight as its only parameter, or a number under variance_epsilon or eps"
    try:
        order = huggingface.cast_order(module, eps)
    except Exception as error:  # Anything may come out of somebody's forward.
        return f"its forward could not be tried on a CPU tensor ({type(error).__name__}: {error})"
    if order is None:
        return "its forward computes something else than weight * x / sqrt(mean(x**2) + eps)"
    attributes = {
        "normalized_shape": tuple(module.get_parameter("weight").shape),
        "eps": eps,
        "elementwise_affine": True,
        "cast_before_weight": cast_before_weight and order is not CastOrder.AFTER_WEIGHT,
    }
    return _Replacement(_HUGGING_FACE[order], attributes)


def _swap(module: torch.nn.Module, replacement: _Replacement) -> None:
    attributes = vars(module)
    had = {name: attributes[name] for name in replacement.attributes if name in attributes}
    attributes[_ORIGINAL] = _Original(type(module), tuple(replacement.attributes), had)
    attributes.update(replacement.attributes)
    module.__class__ = replacement.cls

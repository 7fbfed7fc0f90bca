"""Which sums of a block are computed together with a norm, read from its text; and which norms it modulates.

A block is a module that holds norms of ours and adds tensors in its forward: a decoder layer, say. A function that
modulates is identified by trying it (see `modulating`).
"""

from __future__ import annotations

import ast
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from ..families.replaced import Derived, Replacing, derived
from .modulating import WRITTEN_OUT, formula_of, modulate
from .probing import mixed_in
from .report import Fused, LeftAloneError
from .rotating import FormulaOfOne, Rotary
from .rotating import formula_of as rotation_of
from .sums import Sums, may_follow, rounds_once
from .text import MODULATE, ROTARY, SUMS, Forward, Modulation, outside, read, rewritten


class FusedBlock(Derived):
    """The base class of every class that `fuse` makes.

    A class's recipe has the class that it was made of, the modulations that are replaced, the names of the norms whose
    sums are fused, and whether the rotation is replaced.
    """

    # The norms that are computed together with the sum before them, with their modulation, with the gradient of their
    # input, which is added again, with the sum of their result, and with the rotation of their result.
    _normforge_fuses: tuple[tuple[str, ...], ...]

    def extra_repr(self) -> str:
        """Return the block's own text, and what is fused, as in the report of `patch`."""
        block: Any = super()
        fused = Fused("", block_class(type(self)), *self._normforge_fuses)
        return ", ".join(filter(None, [block.extra_repr(), str(fused)]))


def block_class(cls: Any) -> type[torch.nn.Module]:
    """Return the class that a block had before its adds were fused; a module's own class if none were."""
    block: type[torch.nn.Module] = cls._normforge_recipe[1][0] if issubclass(cls, FusedBlock) else cls
    return block


def _new(cls: Any, modulated: tuple[int, ...], norms: tuple[str, ...], rotates: bool = False) -> torch.nn.Module:
    """Make a module that was pickled with a class of `fuse`."""
    # A module whose class's text changed or is missing adds as before.
    with suppress(LeftAloneError):
        cls = _fused(cls, modulated, norms, rotates)
    module: torch.nn.Module = cls.__new__(cls)
    return module


def _is_norms(module: torch.nn.Module) -> bool:
    """Return True if a module is a norm of ours, or wraps norms of ours and nothing else, as PEFT's wrappers do."""
    children = list(module.children())
    return all(map(_is_norms, children)) if children else isinstance(module, Replacing)


def _may_add(module: torch.nn.Module) -> bool:
    """Return True if a module holds something else than norms too, and no list of modules that hold norms."""
    children = list(module.children())
    lists = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
    listed = [each for child in children if isinstance(child, lists) for each in child.modules()]
    return not any(isinstance(each, Replacing) for each in listed) and not all(map(_is_norms, children))


def fuse(path: str, module: torch.nn.Module) -> Fused | None:
    """Fuse a module if it is a block; return None if it has nothing to fuse.

    The module is not called, and no hook runs.

    Raises:
        LeftAloneError: the module is a block that is left as it is.
    """
    cls: Any = type(module)
    if isinstance(module, FusedBlock) or not any(map(_is_norms, module.children())):
        return None
    adds = _may_add(module)
    # The norms that a sum can be computed together with.
    followers = tuple(name for name, child in module._modules.items() if child is not None and may_follow(child))
    try:
        forward = read(cls)
    except LeftAloneError:
        if adds and followers:
            raise
        return None
    modulated = tuple(which for which, each in enumerate(forward.modulations) if _is_modulated(module, forward, each))
    rotated = _rotated_by(module, forward)
    # Fusing a norm with its modulation saves more than fusing it with the sum before it.
    names = {*(forward.modulations[which].norm for which in modulated), *rotated}
    norms = tuple(name for name in followers if name not in names)
    if modulated or rotated or (adds and followers and forward.sums):
        if "forward" in vars(module):
            raise LeftAloneError("its forward is overridden on the instance")
        if mixed := mixed_in(cls):
            raise LeftAloneError(f"{cls.__name__} is also a {mixed}; patch before it is made one")
        if any(fuses := _fused_by(forward, modulated, norms, rotated)):
            module.__class__ = _fused(cls, modulated, norms, bool(rotated))
            return Fused(path, cls, *fuses)
    if adds and (reason := _why_unfused(module, forward, followers)) is not None:
        raise LeftAloneError(reason)
    return None


def _why_unfused(module: torch.nn.Module, forward: Forward, followers: tuple[str, ...]) -> str | None:
    """Return why no sum of a module that may add is fused; None if there is nothing to tell."""
    if followers and not forward.sums:
        adders = [name for name in forward.function.__code__.co_names if "add" in name.lower().split("_")]
        return f"it adds by {adders[0]}(), and patch sees sums written as a + b" if adders else None
    beside = {name for each in forward.sums for name in each.norms}
    for name, child in module._modules.items():
        if child is None or name not in beside or name in followers or not _is_norms(child):
            continue
        if isinstance(child, Replacing):
            return f"{name} is a {type(child).__name__}, and a sum is fused with a plain LayerNorm or RMSNorm"
        return (
            f"{name} is a {type(child).__name__} around norms, and a sum is fused with a norm that the block itself "
            "holds; take the wrapper away before patch (PEFT: merge_and_unload)"
        )
    return "no norm is called directly behind a sum, or with what is added later" if followers else None


def _fused_by(
    forward: Forward, modulated: tuple[int, ...], norms: tuple[str, ...], rotated: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the norms that are fused, in the order of the fields of `Fused`."""
    sums = forward.sums_with(norms, modulated)
    behind = dict.fromkeys(each.behind for each in sums if each.behind in norms)
    inputs = {name for each in sums for name in each.inputs}
    pairs = [(forward.modulations[which].norm, _formula_of(forward, forward.modulations[which])) for which in modulated]
    turned = dict.fromkeys(name for name, formula in pairs if isinstance(formula, FormulaOfOne))
    names = dict.fromkeys(name for name, formula in pairs if not isinstance(formula, FormulaOfOne))
    added = {each.added for each in sums}
    those_in = (tuple(name for name in norms if name in some) for some in (inputs, added))
    return tuple(behind), tuple(names), *those_in, (*rotated, *turned)


def _is_modulated(module: torch.nn.Module, forward: Forward, modulation: Modulation) -> bool:
    norm = module._modules.get(modulation.norm)
    if norm is None or not may_follow(norm):
        return False
    formula = _formula_of(forward, modulation)
    # Modulated kernels round once.
    return formula is not None and (isinstance(formula, FormulaOfOne) or rounds_once(norm))


def _formula_of(forward: Forward, modulation: Modulation) -> Any:
    """Return what a modulation computes, or the rotation of one tensor that reads like one; None if it is neither."""
    if modulation.function is None:
        return WRITTEN_OUT
    constants = {each.arg: each.value.value for each in modulation.keywords if isinstance(each.value, ast.Constant)}
    named = tuple(each.arg for each in modulation.keywords if each.arg not in constants)
    function = outside(forward.function, modulation.function)
    return formula_of(function, len(modulation.args), named, tuple(constants.items()))


def _rotated_by(module: torch.nn.Module, forward: Forward) -> tuple[str, ...]:
    """Return the names of the norms of q and k whose results a forward rotates; none where no kernel serves both."""
    rotation = forward.rotation
    if rotation is None or not all(may_follow(module._modules.get(name)) for name in rotation.norms):
        return ()
    formula = rotation_of(outside(forward.function, rotation.node.func))
    return () if formula is None else rotation.norms


@cache
def _fused(cls: Any, modulated: tuple[int, ...], norms: tuple[str, ...], rotates: bool) -> Any:
    """Return the class whose forward fuses some modulations, sums of some norms, and its rotation, cached."""
    forward = read(cls)
    rotated = forward.rotation.norms if rotates and forward.rotation is not None else ()
    namespace = {
        "forward": rewritten(cls, norms, modulated, rotates),
        SUMS: Sums,
        MODULATE: modulate,
        ROTARY: Rotary,
        "_normforge_fuses": _fused_by(forward, modulated, norms, rotated),
    }
    return derived(FusedBlock, cls, (_new, (cls, modulated, norms, rotates)), **namespace)

"""Which sums of a block are computed together with a norm, read from its text; and which norms it modulates.

A block is a module that holds norms of ours and adds tensors in its forward: a decoder layer, say. A function that
modulates is identified by trying it (see `modulating`).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch

from ..families.replaced import Derived, Replacing, derived
from .modulating import formula_of, modulate
from .probing import mixed_in
from .report import Fused, LeftAloneError, Unfused
from .rewriting import MODULATE, SUMS, Forward, read, rewritten
from .sums import Sums, may_follow, rounds_once
from .text import Modulation, dotted


class FusedBlock(Derived):
    """The base class of every class that `fuse` makes.

    A class's recipe has the class that it was made of, the modulations that are replaced, and the names of the norms
    whose sums are fused.
    """

    # The norms that are computed together with the sum before them, with their modulation, and with the gradient of
    # their input, which is added again.
    _normforge_fuses: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]

    @classmethod
    def fused_class(cls) -> type[torch.nn.Module]:
        """Return the class that `fuse` made, of which this class may be a subclass."""
        # A module's class, and a FusedBlock's.
        made: type[Any] = next(base for base in cls.__mro__ if "_normforge_fuses" in vars(base))
        return made

    @classmethod
    def block_class(cls) -> type[torch.nn.Module]:
        """Return the class that a block had before its adds were fused."""
        block: type[torch.nn.Module] = cls._normforge_recipe[1][0]
        return block

    def extra_repr(self) -> str:
        """Return the block's own text, the fused sums, and the norms fused with their modulation."""
        block: Any = super()
        behind, modulated, inputs = self._normforge_fuses
        fused = [f"sum -> {name}" for name in behind]
        fused += [f"gradient of {name} + residual" for name in inputs]
        fused += [f"{name} -> its modulation" for name in modulated]
        return ", ".join(filter(None, [block.extra_repr(), *fused]))


def _new(
    cls: Any, added: tuple[int, ...], modulated: tuple[int, ...] = (), norms: tuple[str, ...] = ()
) -> torch.nn.Module:
    """Make a module that was pickled with a class of `fuse`.

    Earlier releases pickled the additions that are replaced, and some of them neither modulations nor norms.
    """
    try:
        made = _made(cls, modulated, norms)
    except LeftAloneError:
        # The text changed or is missing: the module adds as before.
        made = cls
    module: torch.nn.Module = made.__new__(made)
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


def fuse(path: str, module: torch.nn.Module) -> Fused | Unfused | None:
    """Fuse a module if it is a block; return why it is left alone, or None if it has nothing to fuse.

    The module is not called, and no hook runs.
    """
    cls: Any = type(module)
    try:
        found = _fuse(path, module)
    except LeftAloneError as left:
        found = str(left)
    return Unfused(path, cls, found) if isinstance(found, str) else found


def _fuse(path: str, module: torch.nn.Module) -> Fused | str | None:
    cls: Any = type(module)
    if isinstance(module, FusedBlock) or not any(map(_is_norms, module.children())):
        return None
    adds, followers = _may_add(module), _followers(module)
    try:
        forward = read(cls)
    except LeftAloneError as left:
        return str(left) if adds and followers else None
    modulated = tuple(which for which, each in enumerate(forward.modulations) if _is_modulated(module, forward, each))
    if not modulated and not (adds and followers and forward.sums):
        return _why_unfused(module, forward) if adds else None
    if "forward" in vars(module):
        return "its forward is overridden on the instance"
    if mixed := mixed_in(cls):
        return f"{cls.__name__} is also a {mixed}; patch before it is made one"
    # Fusing a norm with its modulation saves more than fusing it with the sum before it.
    names = {forward.modulations[which].norm for which in modulated}
    norms = tuple(name for name in followers if name not in names)
    fuses = _fused_by(forward, modulated, norms)
    if not any(fuses):
        return _why_unfused(module, forward)
    module.__class__ = _made(cls, modulated, norms)
    return Fused(path, cls, *fuses)


def _followers(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of a module's norms that a sum can be computed together with."""
    return tuple(name for name, child in module._modules.items() if child is not None and may_follow(child))


def _why_unfused(module: torch.nn.Module, forward: Forward) -> str | None:
    """Return why no sum of a module that may add is fused; None if there is nothing to tell."""
    followers = _followers(module)
    if followers and not forward.sums:
        adders = [name for name in forward.function.__code__.co_names if "add" in name.lower().split("_")]
        return f"it adds by {adders[0]}(), and patch sees sums written as a + b" if adders else None
    beside = {name for each in forward.sums for name in (each.behind, *each.inputs)}
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


def _fused_by(forward: Forward, modulated: tuple[int, ...], norms: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the norms that are fused, as in `Fused`: with sums, with modulations, and with gradients."""
    sums = forward.sums_with(norms, modulated)
    behind = dict.fromkeys(each.behind for each in sums if each.behind in norms)
    inputs = {name for each in sums for name in each.inputs}
    names = dict.fromkeys(forward.modulations[which].norm for which in modulated)
    return tuple(behind), tuple(names), tuple(name for name in norms if name in inputs)


def _is_modulated(module: torch.nn.Module, forward: Forward, modulation: Modulation) -> bool:
    norm = module._modules.get(modulation.norm)
    # Modulated kernels round once.
    if norm is None or not (may_follow(norm) and rounds_once(norm)):
        return False
    if modulation.function is None:
        return True
    function = _function(forward, dotted(modulation.function) or "")
    named = tuple(keyword.arg or "" for keyword in modulation.named)
    return formula_of(function, len(modulation.given), named) is not None


def _function(forward: Forward, dotted: str) -> Any:
    """Return the object a name in a forward refers to outside the forward; None for a local variable."""
    first, *others = dotted.split(".")
    if first in forward.function.__code__.co_varnames:
        return None
    names = inspect.getclosurevars(forward.function)
    found = {**names.builtins, **names.globals, **names.nonlocals}.get(first)
    for name in others:
        found = getattr(found, name, None)
    return found


@cache
def _made(cls: Any, modulated: tuple[int, ...], norms: tuple[str, ...]) -> Any:
    """Return the class whose forward fuses some modulations, and the sums of some norms, cached by arguments."""
    namespace = {
        "forward": rewritten(cls, norms, modulated),
        SUMS: Sums,
        MODULATE: modulate,
        "_normforge_fuses": _fused_by(read(cls), modulated, norms),
    }
    return derived(FusedBlock, cls, (_new, (cls, (), modulated, norms)), **namespace)

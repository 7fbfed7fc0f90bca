"""Which sums of a block are computed together with a norm, read from its text; and which norms it modulates.

A block is a module that holds norms of ours and adds tensors in its forward: a decoder layer, say. What a function that
modulates computes is found by trying the function (`modulating`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .following import may_follow
from .modulating import formula_of, may_modulate, modulate
from .modulation_text import Modulation
from .rewriting import MODULATE, SUMS, Forward, UnreadableError, read, rewritten
from .sums import Sums


@dataclass(frozen=True)
class Fusible:
    """What becomes of a block.

    Attributes:
        cls: the class it is to have.
        norms: the names of its norms that are computed together with the sum before them.
        gradients: the names of its norms whose input is added again, and whose backward kernel adds both gradients.
        modulated: the names of its norms that are computed together with their modulation.
    """

    cls: type[torch.nn.Module]
    norms: tuple[str, ...]
    gradients: tuple[str, ...]
    modulated: tuple[str, ...]


class FusedBlock:
    """What every class made by `fusible` is besides."""

    # The class, its additions and modulations that are replaced, and the names of its norms of ours.
    _normforge_made: tuple[type[torch.nn.Module], tuple[int, ...], tuple[int, ...], tuple[str, ...]]

    @classmethod
    def fused_class(cls) -> type[torch.nn.Module]:
        """The class that `fusible` made, of one that may be derived from it."""
        # A module's class, and a FusedBlock's.
        made: type[Any] = next(base for base in cls.__mro__ if "_normforge_made" in vars(base))
        return made

    @classmethod
    def unfused_class(cls) -> type[torch.nn.Module]:
        """The class that it was made of."""
        return cls._normforge_made[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the class that this one was made of, from which it is made again."""
        reduced: Any = super().__reduce_ex__(protocol)
        if "_normforge_made" not in vars(type(self)) or reduced[1][:1] != (type(self),):
            return reduced
        return (_new, self._normforge_made, *reduced[2:])

    def extra_repr(self) -> str:
        """The block's own, which sums are fused, and which norms are with their modulation."""
        block: Any = super()
        own: str = block.extra_repr()
        cls, chosen, modulated, norms = self._normforge_made
        hashable: Any = cls
        forward = read(hashable)
        modulations = [forward.modulations[which] for which in modulated]
        said = [f"sum -> {name}" for name in _behind(forward, chosen, norms)]
        said += [f"gradient of {name} + residual" for name in _inputs(forward, chosen, norms)]
        said += [f"{each.norm} -> its modulation" for each in modulations]
        return ", ".join([own, *said] if own else said)


def _new(
    cls: type[torch.nn.Module],
    chosen: tuple[int, ...],
    modulated: tuple[int, ...] = (),
    norms: tuple[str, ...] = (),
) -> torch.nn.Module:
    """A module of a class that `fusible` made before, in another process maybe, or in a release without the last."""
    try:
        found: Any = cls
        made: type[torch.nn.Module] = _made(found, chosen, modulated, norms)
    except UnreadableError:
        # Its text is another one now, or is not there: it adds as it always did.
        made = cls
    return made.__new__(made)


def may_be_block(module: torch.nn.Module) -> bool:
    """Whether a module holds a norm of ours."""
    return any(may_follow(child) for child in module._modules.values() if child is not None)


def _may_add(module: torch.nn.Module) -> bool:
    """Whether a module holds something else than norms too, and no list of modules that hold norms."""
    children = [child for child in module._modules.values() if child is not None]
    lists = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
    holds_blocks = any(isinstance(child, lists) and _holds_norms(child) for child in children)
    return not holds_blocks and not all(map(may_follow, children))


def _holds_norms(module: torch.nn.Module) -> bool:
    return any(may_follow(each) for each in module.modules())


def fusible(module: torch.nn.Module) -> Fusible | str | None:
    """What becomes of a module that may be a block; why it is left alone; or None if it has nothing to fuse.

    The module is neither called nor changed, and no hook runs.
    """
    cls: Any = type(module)
    adds = _may_add(module)
    try:
        forward = read(cls)
    except UnreadableError as unreadable:
        return str(unreadable) if adds else None
    modulated = _modulated(module, forward)
    if not modulated and not (adds and forward.behind):
        adders = [name for name in forward.function.__code__.co_names if "add" in name.lower().split("_")]
        return f"it adds by {adders[0]}(), and patch sees sums written as a + b" if adds and adders else None
    if "forward" in vars(module):
        return "its forward is overridden on the instance"
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    if mixed := [base.__name__ for base in own if not issubclass(base, torch.nn.Module)]:
        return f"{cls.__name__} is also a {' and a '.join(mixed)}; patch before it is made one"
    spent = {addition for which in modulated for addition in forward.spent[which]}
    names = tuple(dict.fromkeys(forward.modulations[which].norm for which in modulated))
    # A norm with its modulation saves more than one with the sum before it.
    norms = tuple(
        name for name, child in module._modules.items() if child is not None and may_follow(child) and name not in names
    )
    chosen = tuple(
        which
        for which in range(len(forward.behind))
        if which not in spent and (_behind(forward, (which,), norms) or _inputs(forward, (which,), norms))
    )
    if not chosen and not modulated:
        return "no norm is called directly behind a sum, or with what is added later"
    try:
        made = _made(cls, chosen, modulated, norms)
    except UnreadableError as unreadable:
        return str(unreadable)
    return Fusible(made, _behind(forward, chosen, norms), _inputs(forward, chosen, norms), names)


def _behind(forward: Forward, chosen: tuple[int, ...], norms: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the norms directly behind some additions."""
    return tuple(dict.fromkeys(name for name in (forward.behind[which] for which in chosen) if name in norms))


def _inputs(forward: Forward, chosen: tuple[int, ...], norms: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the norms whose input is an operand of some additions."""
    return tuple(name for name in norms if any(name in forward.inputs[which] for which in chosen))


def _modulated(module: torch.nn.Module, forward: Forward) -> tuple[int, ...]:
    """Which modulations of a forward are computed together with their norms."""
    return tuple(which for which, each in enumerate(forward.modulations) if _is_modulated(module, forward, each))


def _is_modulated(module: torch.nn.Module, forward: Forward, modulation: Modulation) -> bool:
    norm = module._modules.get(modulation.norm)
    if norm is None or not may_modulate(norm):
        return False
    if modulation.function is None:
        return True
    function = _function(forward, modulation.function)
    return formula_of(function, modulation.positional, modulation.named) is not None


def _function(forward: Forward, dotted: str) -> Any:
    """What a name in a forward stands for outside it; None if it is a variable of its own."""
    first, *others = dotted.split(".")
    if first in forward.function.__code__.co_varnames:
        return None
    names = inspect.getclosurevars(forward.function)
    found = {**names.builtins, **names.globals, **names.nonlocals}.get(first)
    for name in others:
        found = getattr(found, name, None)
    return found


@cache
def _made(
    cls: Any, chosen: tuple[int, ...], modulated: tuple[int, ...], norms: tuple[str, ...]
) -> type[torch.nn.Module]:
    """The class whose forward fuses some additions and modulations; the same one for the same."""
    namespace = {
        "forward": rewritten(cls, chosen, modulated, norms),
        SUMS: Sums,
        MODULATE: modulate,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_normforge_made": (cls, chosen, modulated, norms),
    }
    # Its name stays: by it accelerate and others know which modules not to split.
    metaclass: Callable[..., type[torch.nn.Module]] = type(cls)
    return metaclass(cls.__name__, (FusedBlock, cls), namespace)

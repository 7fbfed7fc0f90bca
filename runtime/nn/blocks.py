"""Which sums of a block are followed by a norm, found by trying the block on random numbers; which norms it modulates.

A block is a module that holds norms of ours and adds tensors in its forward: a decoder layer, say. What its trial finds
(`block_trial`) is what is fused, and the twin with rewritten additions has to return what the original does, to the
bit. What a block does with a norm's result is read from its text, and a function that modulates is tried by itself
(`modulating`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .block_trial import LEADING, UnlikeError, check, followers
from .following import may_follow
from .modulating import formula_of, may_modulate, modulate
from .modulation_text import Modulation
from .probing import apart
from .rewriting import ADD, MODULATE, Forward, UnreadableError, read, rewritten
from .sums import SITES, Site, add


@dataclass(frozen=True)
class Fusible:
    """What becomes of a block.

    Attributes:
        cls: the class it is to have.
        inner: of each of its sums that are fused, the name of its own norm behind it; None for one that it returns.
        modulated: the names of its norms that are computed together with their modulation.
        unfused: why no sum is fused, None if some are or nobody would ask.
    """

    cls: type[torch.nn.Module]
    inner: tuple[str | None, ...]
    modulated: tuple[str, ...] = ()
    unfused: str | None = None

    def sites(self) -> tuple[Site, ...]:
        """The state of the sums of one block."""
        return tuple(Site(inner) for inner in self.inner)


class FusedBlock:
    """What every class made by `fusible` is besides."""

    _normforge_made: tuple[type[torch.nn.Module], tuple[int, ...], tuple[int, ...]]

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
        sites: tuple[Site, ...] = self.__dict__.get(SITES, ())
        cls, _, modulated = self._normforge_made
        hashable: Any = cls
        modulations = [read(hashable).modulations[which] for which in modulated]
        said = [f"sum -> {site.inner or 'the norm behind it'}" for site in sites]
        said += [f"{each.norm} -> its modulation" for each in modulations]
        return ", ".join([own, *said] if own else said)


def _new(cls: type[torch.nn.Module], chosen: tuple[int, ...], modulated: tuple[int, ...] = ()) -> torch.nn.Module:
    """A module of a class that `fusible` made before, in another process maybe, or in a release without the last."""
    try:
        found: Any = cls
        made: type[torch.nn.Module] = _made(found, chosen, modulated)
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
    if not modulated and not (adds and forward.additions):
        adders = [name for name in forward.function.__code__.co_names if "add" in name.lower().split("_")]
        return f"it adds by {adders[0]}(), and patch sees sums written as a + b" if adds and adders else None
    if "forward" in vars(module):
        return "its forward is overridden on the instance"
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    if mixed := [base.__name__ for base in own if not issubclass(base, torch.nn.Module)]:
        return f"{cls.__name__} is also a {' and a '.join(mixed)}; patch before it is made one"
    spent = {addition for which in modulated for addition in forward.spent[which]}
    found = _sums(module, forward, modulated, spent) if adds and forward.additions > len(spent) else {}
    unfused = found if isinstance(found, str) else None
    chosen = {} if isinstance(found, str) else found
    if not chosen and not modulated:
        return unfused
    try:
        made = _made(cls, tuple(chosen), modulated)
    except UnreadableError as unreadable:
        return str(unreadable)
    norms = tuple(forward.modulations[which].norm for which in modulated)
    return Fusible(made, tuple(follower or None for follower in chosen.values()), norms, unfused)


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


def _sums(
    module: torch.nn.Module, forward: Forward, modulated: tuple[int, ...], spent: Collection[int]
) -> dict[int, str] | str:
    """The additions to fuse, each with the norm that is called with it, "" if it is returned; or why there is none."""
    norms = {forward.modulations[which].norm for which in modulated}
    try:
        with apart():
            found = followers(module, forward)
            # A norm with its modulation saves more than one with the sum before it, and is computed when it is called.
            chosen = {
                which: norm
                for which, norm in found.items()
                if norm is not None and norm not in norms and which not in spent
            }
            if chosen or modulated:
                check(module, forward, chosen, modulated)
    except (UnreadableError, UnlikeError) as unlike:
        return str(unlike)
    except Exception as error:  # Anything may come out of somebody's forward.
        return (
            "it runs as before, since patch cannot see which norms take its sums: called with a random tensor of shape "
            f"{(*LEADING, 'N')}, and with stand-ins for its parts, its forward raised {type(error).__name__}: {error}"
        )
    return chosen or "no norm is called with a sum of its forward, and none is returned"


@cache
def _made(cls: Any, chosen: tuple[int, ...], modulated: tuple[int, ...]) -> type[torch.nn.Module]:
    """The class whose forward fuses some additions and modulations; the same one for the same."""
    namespace = {
        "forward": rewritten(cls, chosen, modulated),
        ADD: add,
        MODULATE: modulate,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_normforge_made": (cls, chosen, modulated),
    }
    # Its name stays: by it accelerate and others know which modules not to split.
    metaclass: Callable[..., type[torch.nn.Module]] = type(cls)
    return metaclass(cls.__name__, (FusedBlock, cls), namespace)

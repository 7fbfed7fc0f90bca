"""Which sums of a block are followed by a norm, found by trying the block on random numbers; which norms it modulates.

A block is a module that holds norms of ours and adds tensors in its forward: a decoder layer, say. Its forward is
called on a twin whose parts are stand-ins, in training and in evaluation, and each sum is watched: which norm is called
with it, or whether it is returned. So attention's arguments, caches and masks need not be known. What is found is what
is fused, and the twin with rewritten additions has to return what the original does, to the bit. What a block does with
a norm's result is read from its text, and a function that modulates is tried by itself (`modulating`).
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

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
        return None
    if "forward" in vars(module):
        return "its forward is overridden on the instance"
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    if mixed := [base.__name__ for base in own if not issubclass(base, torch.nn.Module)]:
        return f"{cls.__name__} is also a {' and a '.join(mixed)}; patch before it is made one"
    spent = {addition for which in modulated for addition in forward.spent[which]}
    found = _sums(module, forward, modulated) if adds and forward.additions > len(spent) else {}
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


def _sums(module: torch.nn.Module, forward: Forward, modulated: tuple[int, ...]) -> dict[int, str] | str:
    """The additions to fuse, each with the norm that is called with it, or _RETURNED; or why there is none."""
    norms = {forward.modulations[which].norm for which in modulated}
    spent = {addition for which in modulated for addition in forward.spent[which]}
    try:
        with apart():
            found = _followers(module, forward)
            # A norm with its modulation saves more than one with the sum before it, and is computed when it is called.
            left = {which: each for which, each in found.items() if each is not None and each not in norms}
            chosen = {which: each for which, each in left.items() if which not in spent}
            if chosen or modulated:
                _check(module, forward, chosen, modulated)
    except (UnreadableError, _UnlikeError) as unlike:
        return str(unlike)
    except Exception as error:  # Anything may come out of somebody's forward.
        return f"its forward could not be tried on random numbers ({type(error).__name__}: {error})"
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


class _UnlikeError(Exception):
    """A block that does not do what a fused one would; the text says what."""


# Stands for the name of a norm where a sum is returned.
_RETURNED = ""


def _followers(module: torch.nn.Module, forward: Forward) -> dict[int, str | None]:
    """Of each addition, the norm that is called with it first, _RETURNED if none is and it is returned, or None."""
    found: dict[int, str | None] = {}
    watched = forward.adding
    for training in (True, False):
        trial = _Trial(module, watched, training)
        returned = trial.run()
        for which in range(forward.additions):
            follower = trial.watch.follower(which, returned)
            if found.setdefault(which, follower) != follower:
                found[which] = None
    return found


def _check(module: torch.nn.Module, forward: Forward, added: Iterable[int], modulated: Iterable[int]) -> None:
    """Refuse a block that returns something else when its additions and modulations are calls."""
    functions = (forward.function, forward.changed(added, modulated))
    for training in (True, False):
        one, other = (_tensors(_Trial(module, function, training).run()) for function in functions)
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            raise _UnlikeError("its forward returns something else when it is called again")


@dataclass
class _Watch:
    """What became of sums."""

    sums: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    normed: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def add(self, index: int, a: Any, b: Any) -> Any:
        """What stands for a + b."""
        total = a + b
        self.sums.setdefault(index, []).append(total)
        return total

    def follower(self, which: int, returned: Any) -> str | None:
        totals = self.sums.get(which, [])
        if len(totals) != 1 or not isinstance(totals[0], torch.Tensor):
            return None
        total = totals[0]
        names = [name for name, normed in self.normed if normed is total]
        if names:
            return names[0]
        return _RETURNED if any(each is total for each in _tensors(returned)) else None


def _tensors(returned: Any) -> list[torch.Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(returned, torch.Tensor):
        return [returned]
    if isinstance(returned, dict):
        returned = tuple(returned.values())
    return [each for part in returned for each in _tensors(part)] if isinstance(returned, (tuple, list)) else []


# What a part of a block may return beside a tensor, attention's weights and caches say, likely ones first. A tensor
# alone comes last: to take the first of a tuple from it is no error.
_RETURNS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda tensor: (tensor, None),
    lambda tensor: (tensor, None, None),
    lambda tensor: tensor,
)
_MOST_RUNS = 200

# An odd batch, so that a tensor is not taken for a tuple of two or three.
_LEADING = (5, 4)


class _StandIn(torch.nn.Module):
    """A part of a block: it returns a tensor like the first that it is given, and else looks like the part."""

    def __init__(self, name: str, part: torch.nn.Module, trial: _Trial) -> None:
        super().__init__()
        vars(self)["_stands_for"] = (name, part, trial)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stands_for"][1], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name, part, trial = vars(self)["_stands_for"]
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if given is None or (args and not isinstance(args[0], torch.Tensor)):
            raise TypeError(f"{name} is not given a tensor")
        returned = torch.tanh(given * (1 + trial.order(name) / 8))
        if may_follow(part):
            trial.watch.normed.append((name, given))
            return returned
        return trial.returns(name)(returned)


class _Trial:
    """A block's forward on a twin of stand-ins."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any], training: bool) -> None:
        self.watch = _Watch()
        self._module = module
        self._function = function
        self._training = training
        # Of the parts that were called, in the order of their first calls, which of _RETURNS they do.
        self._choices: dict[str, int] = {}
        self._names = {name: order for order, name in enumerate(module._modules)}

    def order(self, name: str) -> int:
        """A number of a part's own."""
        return 1 + self._names[name]

    def returns(self, name: str) -> Callable[[torch.Tensor], Any]:
        """How a part returns its tensor."""
        return _RETURNS[self._choices.setdefault(name, 0)]

    def run(self) -> Any:
        """What the forward returns, with parts that return what it can take."""
        first: Exception | None = None
        for required in (None, "tensor"):
            self._choices.clear()
            for _ in range(_MOST_RUNS):
                self.watch.sums.clear()
                self.watch.normed.clear()
                try:
                    return self._once(required)
                except Exception as error:  # Another choice may do.
                    first = first or error
                if not self._next():
                    break
        assert first is not None
        raise first

    def _next(self) -> bool:
        """Turn to the next choice, the part that was called last turning fastest."""
        while self._choices:
            name, choice = self._choices.popitem()
            if choice + 1 < len(_RETURNS):
                self._choices[name] = choice + 1
                return True
        return False

    def _once(self, required: str | None) -> Any:
        module, names = self._module, list(inspect.signature(self._function).parameters.values())
        generator = torch.Generator("cpu").manual_seed(0)

        def random() -> torch.Tensor:
            shape = (*_LEADING, _width(module))
            return torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()

        arguments = [random()]
        others = {
            parameter.name: random() if required else None
            for parameter in names[2:]
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        torch.default_generator.manual_seed(0)
        return self._function(self._twin(), *arguments, **others)

    def _twin(self) -> torch.nn.Module:
        module = self._module
        twin = object.__new__(type(module))
        vars(twin).update(vars(module))
        generator = torch.Generator("cpu").manual_seed(1)
        held = {
            "training": self._training,
            "_parameters": {name: _random(each, generator) for name, each in module._parameters.items()},
            "_buffers": {name: None if each is None else _zeros(each) for name, each in module._buffers.items()},
            "_modules": {name: self._part(name, each) for name, each in module._modules.items()},
        }
        vars(twin).update(held | {ADD: self.watch.add, MODULATE: functools.partial(modulate, twin)})
        return twin

    def _part(self, name: str, part: torch.nn.Module | None) -> torch.nn.Module | None:
        if part is None:
            return None
        held = next(part.parameters(), next(part.buffers(), None))
        if held is not None or may_follow(part):
            return _StandIn(name, part, self)
        # Dropout and activations are as good as any stand-in.
        return _bare(part, self._training)


def _bare(module: torch.nn.Module, training: bool) -> torch.nn.Module:
    """A copy of a module that holds no tensors, without its hooks."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module))
    children = {name: None if each is None else _bare(each, training) for name, each in module._modules.items()}
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(module) if name.endswith("_hooks")}
    vars(twin).update(hooks | {"training": training, "_modules": children})
    return twin


def _random(parameter: torch.nn.Parameter | None, generator: torch.Generator) -> torch.nn.Parameter | None:
    if parameter is None:
        return None
    return torch.nn.Parameter(torch.randn(tuple(parameter.shape), generator=generator, dtype=torch.float32))


def _zeros(buffer: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
    return torch.zeros(tuple(buffer.shape), dtype=dtype)


def _width(module: torch.nn.Module) -> int:
    norm = next(child for child in module._modules.values() if child is not None and may_follow(child))
    return int(vars(norm)["normalized_shape"][0])

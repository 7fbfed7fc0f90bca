"""Which sums of a block are followed by a norm, found by trying the block on random numbers.

A block is a module that holds norms of ours and adds tensors in its forward: a decoder layer, say. Its forward is
called on a twin whose parts are stand-ins, in training and in evaluation, and each sum is watched: which norm is called
with it, or whether it is returned. So attention's arguments, caches and masks need not be known. What is found is what
is fused, and the twin with rewritten additions has to return what the original does, to the bit.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from .following import may_follow
from .probing import apart
from .rewriting import ADD, Forward, UnreadableError, read, rewritten
from .sums import SITES, Site, add


@dataclass(frozen=True)
class Fusible:
    """What becomes of a block.

    Attributes:
        cls: the class it is to have.
        inner: of each of its sums that are fused, the name of its own norm behind it; None for one that it returns.
    """

    cls: type[torch.nn.Module]
    inner: tuple[str | None, ...]

    def sites(self) -> tuple[Site, ...]:
        """The state of the sums of one block."""
        return tuple(Site(inner) for inner in self.inner)


class FusedBlock:
    """What every class made by `fusible` is besides."""

    _normforge_made: tuple[type[torch.nn.Module], tuple[int, ...]]

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
        """The block's own, and which sums are fused."""
        block: Any = super()
        own: str = block.extra_repr()
        sites: tuple[Site, ...] = self.__dict__.get(SITES, ())
        said = ", ".join(f"sum -> {site.inner or 'the norm behind it'}" for site in sites)
        return f"{own}{', ' if own and said else ''}{said}"


def _new(cls: type[torch.nn.Module], chosen: tuple[int, ...]) -> torch.nn.Module:
    """A module of a class that `fusible` made before, in another process maybe."""
    try:
        found: Any = cls
        made: type[torch.nn.Module] = _made(found, chosen)
    except UnreadableError:
        # Its text is another one now, or is not there: it adds as it always did.
        made = cls
    return made.__new__(made)


def may_be_block(module: torch.nn.Module) -> bool:
    """Whether a module holds a norm of ours and something else, and no list of modules that do."""
    children = [child for child in module._modules.values() if child is not None]
    norms = [child for child in children if may_follow(child)]
    lists = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
    holds_blocks = any(isinstance(child, lists) and _holds_norms(child) for child in children)
    return bool(norms) and len(norms) < len(children) and not holds_blocks


def _holds_norms(module: torch.nn.Module) -> bool:
    return any(may_follow(each) for each in module.modules())


def fusible(module: torch.nn.Module) -> Fusible | str | None:
    """What becomes of a module that may be a block; why it is left alone; or None if it adds nothing that a norm takes.

    The module is neither called nor changed, and no hook runs.
    """
    cls: Any = type(module)
    try:
        forward = read(cls)
    except UnreadableError as unreadable:
        return str(unreadable)
    if not forward.additions:
        return None
    if "forward" in vars(module):
        return "its forward is overridden on the instance"
    own = cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
    if mixed := [base.__name__ for base in own if not issubclass(base, torch.nn.Module)]:
        return f"{cls.__name__} is also a {' and a '.join(mixed)}; patch before it is made one"
    try:
        with apart():
            found = _followers(module, forward)
            chosen = tuple(which for which, follower in found.items() if follower is not None)
            if not chosen:
                return "no norm is called with a sum of its forward, and none is returned"
            made = _made(cls, chosen)
            _check(module, forward)
    except (UnreadableError, _UnlikeError) as unlike:
        return str(unlike)
    except Exception as error:  # Anything may come out of somebody's forward.
        return f"its forward could not be tried on random numbers ({type(error).__name__}: {error})"
    inner = tuple(None if found[which] == _RETURNED else found[which] for which in chosen)
    return Fusible(made, inner)


@cache
def _made(cls: Any, chosen: tuple[int, ...]) -> type[torch.nn.Module]:
    """The class whose forward fuses some additions; the same one for the same."""
    namespace = {
        "forward": rewritten(cls, chosen),
        ADD: add,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_normforge_made": (cls, chosen),
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


def _check(module: torch.nn.Module, forward: Forward) -> None:
    """Refuse a block that returns something else when its additions are calls."""
    functions = (forward.function, forward.adding)
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
        vars(twin).update(held | {ADD: self.watch.add})
        return twin

    def _part(self, name: str, part: torch.nn.Module | None) -> torch.nn.Module | None:
        if part is None:
            return None
        held = next(part.parameters(), next(part.buffers(), None))
        # Dropout and activations are as good as any stand-in.
        return _bare(part, self._training) if held is None else _StandIn(name, part, self)


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

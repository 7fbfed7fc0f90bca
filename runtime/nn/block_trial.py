"""A block's forward, tried on random numbers on a twin whose parts are stand-ins: which norm is called with which sum.

In training and in evaluation each sum is watched: which norm is called with it, or whether it is returned. So
attention's arguments, caches and masks need not be known.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .following import may_follow
from .modulating import modulate
from .rewriting import ADD, MODULATE, Forward


class UnlikeError(Exception):
    """A block that does not do what a fused one would; the text says what."""


# Stands for the name of a norm where a sum is returned.
RETURNED = ""


def followers(module: torch.nn.Module, forward: Forward) -> dict[int, str | None]:
    """Of each addition, the norm that is called with it first, RETURNED if none is and it is returned, or None."""
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


def check(module: torch.nn.Module, forward: Forward, added: Iterable[int], modulated: Iterable[int]) -> None:
    """Refuse a block that returns something else when its additions and modulations are calls."""
    functions = (forward.function, forward.changed(added, modulated))
    for training in (True, False):
        one, other = (_tensors(_Trial(module, function, training).run()) for function in functions)
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            raise UnlikeError("its forward returns something else when it is called again")


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
        return RETURNED if any(each is total for each in _tensors(returned)) else None


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
LEADING = (5, 4)


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
            shape = (*LEADING, _width(module))
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

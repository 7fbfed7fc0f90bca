"""The parts of a normforge call: key, allocations and launches, each to be repeated by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from normforge.calls.known import Known, all_plans
from normforge.calls.plan import Plan
from normforge.selection import dispatch

from .errors import UsageError
from .timing import Call


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing. The time of an empty call is part of every figure until it is subtracted."""


class Taken(NamedTuple):
    """The parts of one known call.

    Attributes:
        plan: its plan.
        m: its rows.
        key: what its kind was found by.
        known: its kind.
        choose: finds the kernels of the plan, and their grids.
        empty: the plan's allocator.
        allocations: what was asked of it.
        launches: launches, bound to their grids and values; none where kernels are interpreted.
        kept: the tensors that were allocated: launches write to them again.
    """

    plan: Any
    m: int
    key: Any
    known: Known
    choose: Call
    empty: Callable[..., torch.Tensor]
    allocations: list[tuple[Any, ...]]
    launches: list[tuple[Callable[..., None], Any, tuple[Any, ...]]]
    kept: list[torch.Tensor]

    def compare(self, *tensors: torch.Tensor | None) -> Call:
        """Ask whether tensors, all that the call could bring, are like those of its kind, as they are."""
        fits, present = self.known.fits, self.known.present
        if not fits(*present(tensors)):
            raise UsageError("tensors are not like those of the call; benchmarks/call_parts.py has to pass its own")
        return lambda: fits(*present(tensors))

    def look_up(self) -> Call:
        """Make a key and look for it."""
        key, plans = self.key, {self.key: None}
        return lambda: plans.get((*key,))

    def allocate(self) -> Call:
        """Allocate as the call did."""
        empty, allocations = self.empty, tuple(self.allocations)

        def run() -> object:
            tensors = [empty(size, stride, dtype) for size, stride, dtype in allocations]
            return [tensor.data_ptr() for tensor in tensors]

        return run

    def launch(self) -> Call:
        """Launch as the call did, on the same memory."""
        launches = tuple(self.launches)

        # The function holds on to the tensors, because what is launched holds but their addresses.
        def run(_: object = self.kept) -> None:
            for launch, grid, values in launches:
                launch(grid, values)

        return run


def take_apart(call: Call, m: int, interpreted: bool) -> Taken:
    """Run a call twice: to make it known, and to see what it takes of its plan.

    Raises:
        UsageError: it has no plan of its own, or allocates or launches by other ways than the plan's.
    """
    # A call that was known before would add nothing, and which plan is its own could not be told.
    dispatch.plans.clear()
    call()
    if len(all_plans()) != 1:
        raise UsageError(
            f"one call left {len(all_plans())} plans in normforge.selection.dispatch, and parts takes exactly one "
            "apart; benchmarks/take_apart.py has to follow how normforge.calls.known remembers calls"
        )
    ((key, (known,)),) = dispatch.plans.items()
    plan = known.plan
    shape = torch.Size((m, plan.n))
    taken = Taken(plan, m, key, known, lambda: plan.at(shape), plan.empty, [], [], [])

    def allocate(*asked: Any) -> torch.Tensor:
        taken.allocations.append(asked)
        taken.kept.append(plan.empty(*asked))
        return taken.kept[-1]

    def watched(launch: Callable[..., None]) -> Callable[..., None]:
        def watch(grid: Any, values: tuple[Any, ...]) -> None:
            if not interpreted:
                taken.launches.append((launch, grid, values))
            launch(grid, values)

        return watch

    # A stand-in, because an attribute that shadows a method makes every plan of the process slower to ask.
    stand_in = SimpleNamespace(**vars(plan) | {"empty": allocate})
    sized = plan.at(shape)
    is_watched = sized.layout.in_c or plan.mode.is_backward
    layout = (launching(sized, watched) if is_watched else sized).layout
    stand_in.layout, stand_in.at = lambda _: layout, lambda shape: plan.at(shape)._replace(layout=layout)
    known.plan = stand_in
    try:
        call()
    finally:
        known.plan = plan
    if not taken.allocations or not (taken.launches or interpreted):
        raise UsageError(
            f"a call made {len(taken.allocations)} allocations and {len(taken.launches)} launches by its plan, and "
            "parts times those; a warning about Triton's launcher above says why there is no launch, and else "
            "benchmarks/take_apart.py has to follow normforge.calls.launch"
        )
    return taken


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Have all known calls of LayerNorm and RMSNorm launch nothing meanwhile; a backward call is none of them."""
    known = [kind for kinds in dispatch.plans.values() for kind in kinds if isinstance(kind, Known)]
    kinds = [kind for kind in known if isinstance(kind.plan, Plan)]
    plans = [kind.plan for kind in kinds]
    for kind in kinds:
        kind.plan = _launching_nothing(kind.plan)
    try:
        yield
    finally:
        for kind, plan in zip(kinds, plans, strict=True):
            kind.plan = plan


def _launching_nothing(plan: Any) -> Any:
    stand_in = SimpleNamespace(**vars(plan))
    stand_in.at = cache(lambda shape: launching(plan.at(shape), lambda _: nothing, by_address=True, in_c=True))
    return stand_in


def launching(sized: Any, by: Callable[[Any], Any], **others: Any) -> Any:
    """Return how calls of a shape are launched, each launch replaced by what `by` makes of it, and `others`."""
    layout = sized.layout
    steps = tuple((by(launch), grid) for launch, grid in layout.steps)
    finish = None if layout.finish is None else (by(layout.finish[0]), layout.finish[1])
    return sized._replace(layout=layout._replace(steps=steps, finish=finish, **others))


def without(function: Any, **instead: Callable[..., Any] | SimpleNamespace) -> Callable[..., Any]:
    """Return a function of normforge's that finds others in place of some that it calls."""
    missing = sorted(instead.keys() - function.__globals__.keys())
    if missing:
        raise UsageError(
            f"{function.__module__} has no {', '.join(missing)}, which parts leaves out of {function.__name__}; "
            "benchmarks/call_parts.py has to name what it calls now"
        )
    # Code of its own: CPython 3.11 and up notes in it where globals were found, for every function that shares it.
    code = function.__code__.replace(co_name=f"{function.__name__}_alone")
    alone = FunctionType(
        code, function.__globals__ | instead, code.co_name, function.__defaults__, function.__closure__
    )
    alone.__kwdefaults__ = function.__kwdefaults__
    return alone

"""Times of each part of a call in place: the call with the part, less the call without it.

Parts that are done again by themselves find all they need in the CPU's caches, and add up to less than their call.
These add up to it, since each is the difference to the next shorter call: launches are left out, then allocations, and
of a recorded call what is saved and torch's apply. What is left then is normforge's own Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch

from normforge.calls import native
from normforge.families import plain as recorded
from normforge.families import plain_functions, public

from .take_apart import Taken, launching, nothing, without
from .timing import Call

PYTHON, APPLY, SAVING = "normforge's Python", "torch's apply", "what is kept for the backward pass"
ALLOCATIONS, LAUNCH = "allocations", "launch"


def quantised_in_place(taken: Taken, call: Callable[[Callable[..., Any]], Call]) -> dict[str, Call]:
    """Return calls of `layernorm2d_fwd`, each with one thing more; the last lacks only launches.

    Args:
        taken: what the whole call takes.
        call: makes the call of a function with `layernorm2d_fwd`'s signature.
    """

    def made(allocates: bool) -> Call:
        calls = native.calls_among(_known(taken, allocates), native.makes(build=True))
        return call(without(public.layernorm2d_fwd, native=SimpleNamespace(calls=calls)))

    return {PYTHON: made(False), ALLOCATIONS: made(True)}


def recorded_in_place(taken: Taken, call: Callable[[Callable[..., Any]], Call]) -> dict[str, Call]:
    """Return calls of `layer_norm` with a gradient due, each with one thing more."""

    def made(apply: Callable[..., Any], allocates: bool) -> Call:
        records = {"recorded": recorded._recording(apply, apply)}
        calls = native.calls_among(_known(taken, allocates), native.makes(build=True), records)
        return call(without(plain_functions.layer_norm, native=SimpleNamespace(calls=calls)))

    def keeping_nothing(ctx: Any, call: Any, *tensors: Any) -> Any:
        return call[1][0]

    keeping = _apply_of(recorded._Normalise.forward)
    return {
        PYTHON: made(partial(keeping_nothing, None), False),
        APPLY: made(_apply_of(keeping_nothing), False),
        SAVING: made(keeping, False),
        ALLOCATIONS: made(keeping, True),
    }


def _known(taken: Taken, allocates: bool) -> SimpleNamespace:
    """Return the plans of a call that launches nothing, and reuses memory if the call does not allocate."""
    plan = SimpleNamespace(**vars(taken.plan))
    plan.at = cache(lambda shape: launching(taken.plan.at(shape), lambda _: nothing, in_c=True))
    if not allocates:
        again = cycle(taken.kept).__next__
        plan.empty = lambda *_: again()
    known = taken.known
    kind = SimpleNamespace(fits=known.fits, present=known.present, trains=known.trains, plan=plan)
    return SimpleNamespace(plans={taken.key: (kind,)})


def _apply_of(function: Callable[..., Any]) -> Callable[..., Any]:
    methods = {"forward": staticmethod(function), "backward": staticmethod(nothing)}
    alone = type("Alone", (torch.autograd.Function,), methods)
    # Named as in `normforge.families.plain`; a class made by `type` has no types.
    made: Any = alone
    apply: Callable[..., Any] = super(torch.autograd.Function, made).apply
    return apply

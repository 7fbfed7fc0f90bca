"""How many examples the properties take, and of which sizes; `seed` says from which seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from . import seed
from .gradient_problems import BACKWARD_CALLS, STEPS, draw_backward, draw_step
from .problems import CALLS, RENORMED_CALLS, Choose, Kind, Options, T, draw_call, draw_kind


@dataclass(frozen=True)
class Profile:
    """How far to look.

    Attributes:
        factor: examples of each property, of the number that it states.
        shrinks: whether hypothesis makes a failing example smaller, for up to five minutes; an error names its own.
        lengths: of rows.
        shapes: of what is before them.
    """

    factor: int
    shrinks: bool
    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def shapes_of(self, n: int) -> tuple[tuple[int, ...], ...]:
        """Shapes for rows of n elements: short ones take the kernels for many rows too."""
        return (*self.shapes, *_MANY) if n <= _SHORTEST else self.shapes


# The interpreter runs one program after another, which take eight rows each of lengths up to these 128.
_MANY, _SHORTEST = ((258,), (3, 87)), 128

# Each bucket's ends of the standard ladder up to 300, and a length for each pipeline beyond.
_SHORT = (16, 1, 2, 3, 5, 8, 13, 31, 32, 33, 64, 65, 100, 127, 128, 129, 255, 256, 257)
_FEW = ((2,), (1,), (3,), (5,), (9,), (), (2, 2), (2, 3), (2, 2, 3), (2, 2, 2, 2), (3, 1, 2), (1, 1), (0,), (2, 0))

_INTERPRETER = Profile(1, False, (*_SHORT, 300, 769, 1500, 2049, 9001, 33000), _FEW)
PROFILES = {
    "default": _INTERPRETER,
    "long": Profile(
        20, True, (*_INTERPRETER.lengths, 512, 1023, 1024, 1025, 3584, 4099, 5137, 8192, 17134, 70000), _FEW
    ),
}
_GPU = Profile(
    3,
    False,
    (1, 8, 64, 100, 128, 257, 512, 769, 1024, 1536, 2048, 3584, 4096, 4099, 5137, 8192, 12345, 16384, 40000, 70000),
    (*_FEW, (64,), (255,), (256,), (257,), (300,), (17, 31), (1000,), (2048,), (5000,)),
)


def profile_of(device: str) -> Profile:
    """What is looked at on a device."""
    if device == "cuda":
        return _GPU
    name = os.environ.get(seed.PROFILE, "default")
    if name not in PROFILES:
        raise pytest.UsageError(f"{seed.PROFILE}={name!r} is no profile; it takes {' or '.join(PROFILES)}")
    return PROFILES[name]


def _profile() -> Profile:
    return profile_of("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def examples(count: int) -> settings:
    """Return settings for a property of so many examples in the default profile."""
    profile = _profile()
    unwanted = {Phase.explain} if profile.shrinks else {Phase.explain, Phase.shrink}
    return settings(
        max_examples=count * profile.factor,
        phases=[phase for phase in Phase if phase not in unwanted],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        print_blob=True,
    )


# A property is run by the interpreter, and by the same words on a GPU.
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def chooser(data: st.DataObject) -> Choose:
    """Choices that hypothesis makes, and shrinks towards the first option; where nothing shrinks, those of a seed.

    Hypothesis varies the examples before: of a hundred, none may have rows of some length.
    """
    if not _profile().shrinks:
        return data.draw(st.randoms(use_true_random=True)).choice

    def choose(options: Sequence[T], /) -> T:
        return data.draw(st.sampled_from(options))

    return choose


class Problems(NamedTuple):
    """Problems of one form: the options of kinds, and what draws a problem of a kind."""

    options: Options
    draw: Callable[..., Any]


PROBLEMS = {
    "calls": Problems(CALLS, draw_call),
    "renormed": Problems(RENORMED_CALLS, draw_call),
    "steps": Problems(STEPS, draw_step),
    "backward": Problems(BACKWARD_CALLS, draw_backward),
}
# The kinds of problems of a run whose kernels are compiled, by form: each takes a second or so of a core.
Pool = Mapping[str, tuple[Kind, ...]]


def make_pool(choose: Choose, lengths: Sequence[int], counts: Mapping[str, int]) -> Pool:
    """A random pool of so many kinds of each form."""
    return {
        what: tuple(draw_kind(choose, PROBLEMS[what].options, lengths) for _ in range(count))
        for what, count in counts.items()
    }


@cache
def pool() -> Pool:
    """The kinds of this run on a GPU, settled by its seed."""
    choose = random.Random(f"kinds of {seed.settled()}").choice
    return make_pool(choose, _GPU.lengths, {"calls": 32, "renormed": 6, "steps": 10, "backward": 8})


# A number of rows of each class that has kernels of its own.
_CLASSES = ((3,), (300,))


def compile_ahead(kinds: Pool, device: torch.device) -> None:
    """Run a problem of every kind, many at once: what fails is found by what runs it next."""
    choose = random.Random(0).choice
    problems = [
        PROBLEMS[what].draw(choose, kind, (leading,)) for what in kinds for kind in kinds[what] for leading in _CLASSES
    ]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        wait([threads.submit(lambda each: each.made(device).run(), problem) for problem in problems])


def kind_for(choose: Choose, device: str, what: str = "calls") -> Kind:
    """A kind of problems of a form: any, or on a GPU one of the pool's."""
    if device == "cuda":
        return choose(pool()[what])
    return draw_kind(choose, PROBLEMS[what].options, profile_of(device).lengths)


def problem_for(choose: Choose, device: str, what: str = "calls", kind: Kind | None = None) -> Any:
    """A problem of a form, of any kind or of a given one."""
    kind = kind or kind_for(choose, device, what)
    return PROBLEMS[what].draw(choose, kind, profile_of(device).shapes_of(kind.n))

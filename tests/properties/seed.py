"""The one seed of all random problems of a run.

A run without a GPU draws the same ones each time, seed 0: if it turns red, what was changed since did it. Where
somebody looks for defects (on a GPU, with NORMFORGE_PROPERTIES=long or NORMFORGE_FIRE, in the soak) the seed is of the
clock. Every run says its seed, and takes another.
"""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
from hypothesis.internal.conjecture import providers

# The profile, see `profile`.
PROFILE = "NORMFORGE_PROPERTIES"
# How many times as many examples the generator's tests take, see `tests.fire.world`.
FIRE = "NORMFORGE_FIRE"

# Set here for a run's worker processes.
_SEED = "NORMFORGE_PROPERTIES_SEED"


def fresh() -> int:
    """A seed of the clock."""
    return time.time_ns() // 1000 % 10**9


def settle(config: pytest.Config, *, looks: bool) -> None:
    """Give hypothesis its seed, unless --hypothesis-seed does; it reads the option later than this.

    Args:
        config: of the run.
        looks: whether the run is one that looks for defects, on a GPU.
    """
    if config.option.hypothesis_seed is None:
        fixed = not looks and os.environ.get(PROFILE, "default") == "default" and not os.environ.get(FIRE)
        config.option.hypothesis_seed = "0" if fixed else os.environ.get(_SEED) or str(fresh())
    os.environ[_SEED] = config.option.hypothesis_seed
    _forget_modules()


def settled() -> str:
    """This run's seed."""
    return os.environ[_SEED]


def header() -> str:
    """The line of a run that says how to repeat its random problems."""
    return f"random problems: profile {os.environ.get(PROFILE, 'default')}, --hypothesis-seed={settled()} repeats them"


def _forget_modules() -> None:
    """Let hypothesis draw no constants of the modules that happen to be imported.

    It has no setting for that. What a worker ran before would otherwise decide what a seed stands for, and one test run
    by itself would not repeat what it did among others. Releases before 6.131 draw none.
    """
    none = getattr(providers, "_local_constants", None)
    mock.patch.object(providers, "_get_local_constants", return_value=none, create=True).start()

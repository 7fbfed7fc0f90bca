"""How many examples a test takes, and whether they are the same each time.

By default a test takes a slice, the same in every run, so that a fresh clone does not fail by chance. With
NORMFORGE_FIRE=10 it takes ten times as many, drawn anew in each run. Hypothesis prints what failed, and what to pass to
have it again: a `@reproduce_failure`, and `--hypothesis-seed=N` for the whole run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_TIMES = os.environ.get("NORMFORGE_FIRE")


def fire(examples: int) -> settings:
    """The settings of a test that takes so many examples by default; a decorator."""
    return settings(
        max_examples=examples * int(_TIMES or 1),
        derandomize=_TIMES is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )

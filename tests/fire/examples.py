"""How many examples a test takes.

By default a test takes a slice, of the run's seed (`tests.properties.seed`): the same each time, so that a fresh clone
does not fail by chance. With NORMFORGE_FIRE=10 it takes ten times as many, of a fresh seed, which the run says.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from ..properties.seed import FIRE

_TIMES = int(os.environ.get(FIRE) or 1)


def fire(examples: int) -> settings:
    """The settings of a test that takes so many examples by default; a decorator."""
    return settings(
        max_examples=examples * _TIMES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )

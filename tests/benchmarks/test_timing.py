"""How calls are timed where the host takes longer for them than the GPU."""

from __future__ import annotations

import pytest

from benchmarks.timing import flushes_ahead


@pytest.mark.parametrize("host_ms", [0.01, 0.1, 0.2, 0.4, 1.3])
def test_the_gpu_is_behind_the_host_when_a_call_comes(host_ms: float) -> None:
    flush_ms = 0.25
    flushes = flushes_ahead(host_ms, flush_ms)
    assert flushes * flush_ms > host_ms
    # And little of a run's time goes into it.
    assert (flushes - 1) * flush_ms < 2 * host_ms

"""JAX as these tests want it; a file that imports this is skipped where there is none."""

from __future__ import annotations

import os

import pytest

# torch is on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax = pytest.importorskip("jax", reason="JAX is not installed: normforge[jax] needs Python 3.11 or newer")

DEVICES = 4


def settle(*, on_gpu: bool) -> None:
    """Before anything runs: several devices on the CPU, and no other unless a GPU is what is tested."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if not on_gpu:
        jax.config.update("jax_platforms", "cpu")
        # Tests run each program once.
        jax.config.update("jax_disable_most_optimizations", True)

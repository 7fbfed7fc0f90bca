"""JAX as these tests want it, and operands; a file that imports this is skipped where there is none."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

# torch is on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax = pytest.importorskip("jax", reason="JAX is not installed: normforge[jax] needs Python 3.11 or newer")


def settle(*, on_gpu: bool) -> None:
    """Before anything runs: several devices on the CPU, and no other unless a GPU is what is tested."""
    jax.config.update("jax_num_cpu_devices", 4)
    if not on_gpu:
        jax.config.update("jax_platforms", "cpu")
        # Tests run each program once.
        jax.config.update("jax_disable_most_optimizations", True)


def arrays(seed: int, shape: tuple[int, ...], dtype: Any = "float32", n: int = 1) -> list[Any]:
    """Random arrays."""
    generator = np.random.default_rng(seed)
    return [jax.numpy.asarray(generator.standard_normal(shape), dtype) for _ in range(n)]

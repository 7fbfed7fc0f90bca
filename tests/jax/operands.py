"""Operands of norms of JAX arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .settled import jax


def arrays(seed: int, shape: tuple[int, ...], dtype: Any = "float32", n: int = 1) -> list[Any]:
    """Random arrays."""
    generator = np.random.default_rng(seed)
    return [jax.numpy.asarray(generator.standard_normal(shape), dtype) for _ in range(n)]

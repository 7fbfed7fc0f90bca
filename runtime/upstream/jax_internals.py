"""Private interfaces of JAX: for arrays inside `jax.shard_map`, and for primitives that are split over devices."""

from __future__ import annotations

import jax
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import Primitive


def needs_devices(primitive: Primitive) -> None:
    """Have JAX say on which devices a program lies when it lowers a primitive, as `custom_partitioning` asks."""
    prim_requires_devices_during_lowering.add(primitive)


def varying(*arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays, each made to vary over every axis that any of the arrays varies over.

    The rule of the cast then sums the gradient of an array that was the same everywhere over these axes.
    """
    axes = [_axes(array) for array in arrays]
    every = frozenset().union(*axes)
    return [
        jax.lax.pcast(array, tuple(sorted(every - own)), to="varying") if every - own else array
        for array, own in zip(arrays, axes, strict=True)
    ]


def _axes(array: jax.Array) -> frozenset[str]:
    kind = getattr(jax.typeof(array), "mat", None)
    return frozenset(getattr(kind, "varying", ()))

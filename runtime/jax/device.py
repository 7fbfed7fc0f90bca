"""Which GPU kernels are chosen and compiled for: the one that JAX found, or one that is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache

import jax

from ..errors import DeviceError
from ..kernels.gpu import Target, named_target

_named: ContextVar[Target | None] = ContextVar("normforge_jax_target", default=None)


@contextmanager
def lower_for(arch: str, multiprocessors: int | None = None) -> Iterator[None]:
    """Lower for a named GPU, which this machine need not have, inside a `with` block.

    It goes with `jax.export.export(..., platforms=["cuda"])` and `jax.jit(...).trace(...).lower(lowering_platforms=
    ("cuda",))`. What JAX has lowered before, of the same function and shapes, it may give again.

    Args:
        arch: NVIDIA's, "sm_90" say.
        multiprocessors: how many such a GPU has, if not the usual number.

    Raises:
        TargetError: there is no such architecture.
        DeviceError: it is not NVIDIA's.
    """
    target = named_target(arch, multiprocessors)
    if not target.is_nvidia:
        raise DeviceError(f"arch is {arch!r}, and JAX launches PTX, which it does not run; name an NVIDIA GPU: 'sm_90'")
    before = _named.set(replace(target, plainly=True))
    try:
        yield
    finally:
        _named.reset(before)


def target() -> Target:
    """Return the GPU to lower for.

    Raises:
        DeviceError: none is here, and none was named.
    """
    return _named.get() or _here()


@cache
def _here() -> Target:
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise DeviceError(
            f"JAX finds no NVIDIA GPU to lower for ({error}); name one: with normforge.jax.lower_for('sm_90')"
        ) from error
    major, minor = str(device.compute_capability).split(".")
    # Some releases do not report the number of multiprocessors; those get the architecture's usual number.
    count = getattr(device, "core_count", None)
    return replace(named_target(f"sm_{major}{minor}", None if count is None else int(count)), plainly=True)

"""Kernels under torch's own operators: for a device, and which of them ran."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from normforge.override import served
from normforge.override.switch import Switch, TorchOverride

from ..calling import counted

# On a CPU kernels run in Triton's interpreter; where there is a GPU, `override_torch` itself leaves the CPU alone.
_SWITCHES = {"cpu": Switch("CPU"), "cuda": Switch("CUDA")}

KERNELS = ("layernorm2d_fwd", "layernorm2d_bwd", "rmsnorm2d_fwd", "rmsnorm2d_bwd")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    for switch in _SWITCHES.values():
        switch.leave(None)


def override(device: str = "cpu") -> TorchOverride:
    """`override_torch` of a device."""
    return TorchOverride(_SWITCHES[device])


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that served calls of torch's, in the order in which they ended."""
    return counted(monkeypatch, *((served, name, name) for name in KERNELS))

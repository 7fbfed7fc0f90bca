"""The launcher in C on a card: an error of the driver is raised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normforge
from normforge.upstream import triton_launcher
from normforge.upstream.triton_launcher import Arguments, Launch

from ..calling import same_bits, there

pytestmark = pytest.mark.gpu

Bound = tuple[Any, Arguments]


@pytest.fixture(autouse=True)
def bound(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """What is made ready to be launched, of nothing that was before: kernels, their arguments, and launches."""
    found: list[Bound] = []
    bind = triton_launcher.bind

    def spy(compiled: Any, arguments: Arguments) -> Launch | None:
        found.append((compiled, arguments))
        return bind(compiled, arguments)

    monkeypatch.setattr(triton_launcher, "bind", spy)
    monkeypatch.delenv("NORMFORGE_NATIVE_LAUNCHER", raising=False)
    if triton_launcher.library(build=True) is None:
        pytest.skip("takes a C compiler")
    return found


def test_a_launch_that_the_driver_refuses_is_an_error_and_the_next_runs(bound: list[Bound]) -> None:
    x = torch.randn(4, 64, device="cuda")
    expected = normforge.layernorm2d_fwd(x).y
    ((whole, arguments), *_) = bound
    _, clusters, shared = whole.packed_metadata
    # Programs of 2048 threads.
    told = {"run": whole.run, "src": whole.src, "metadata": whole.metadata, "function": whole.function}
    launch = there(triton_launcher.bind(SimpleNamespace(packed_metadata=(64, clusters, shared), **told), arguments))
    assert type(launch).__module__ == triton_launcher.NAME
    with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: invalid argument$"):
        launch((1, 1, 1), (0,) * arguments.n_values)
    assert same_bits(normforge.layernorm2d_fwd(x).y, expected)

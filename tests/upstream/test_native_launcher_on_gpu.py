"""The launcher in C on a card: an error of the driver is raised."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normforge
from normforge.upstream import triton_launcher
from normforge.upstream.triton_launcher import Arguments, Launch

from ..calling import same_bits

pytestmark = pytest.mark.gpu

Bound = tuple[Any, Arguments, "Launch | None"]
Step = Callable[[], tuple[torch.Tensor, ...]]


@pytest.fixture(autouse=True)
def bound(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """What is made ready to be launched, of nothing that was before: kernels, their arguments, and launches."""
    found: list[Bound] = []
    bind = triton_launcher.bind

    def spy(compiled: Any, arguments: Arguments) -> Launch | None:
        launch = bind(compiled, arguments)
        found.append((compiled, arguments, launch))
        return launch

    monkeypatch.setattr(triton_launcher, "bind", spy)
    monkeypatch.delenv("NORMFORGE_NATIVE_LAUNCHER", raising=False)
    if triton_launcher.library(build=True) is None:
        pytest.skip("takes a C compiler")
    return found


def are_native(bound: list[Bound]) -> set[bool]:
    return {type(launch).__module__ == triton_launcher.NAME for _, _, launch in bound}


def test_a_launch_that_the_driver_refuses_is_an_error_and_the_next_runs(bound: list[Bound]) -> None:
    x = torch.randn(4, 64, device="cuda")
    expected = normforge.layernorm2d_fwd(x).y
    ((whole, arguments, _), *_) = bound
    _, clusters, shared = whole.packed_metadata
    # Programs of 2048 threads.
    told = {"run": whole.run, "src": whole.src, "metadata": whole.metadata, "function": whole.function}
    launch = triton_launcher.bind(SimpleNamespace(packed_metadata=(64, clusters, shared), **told), arguments)
    assert launch is not None
    assert are_native(bound[-1:]) == {True}
    with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: invalid argument$"):
        launch((1, 1, 1), (0,) * arguments.n_values)
    assert same_bits(normforge.layernorm2d_fwd(x).y, expected)

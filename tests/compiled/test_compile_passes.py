"""normforge.compile_passes: what torch.compile makes of models with it, and what stays as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import normforge
from normforge.compiled import switch
from normforge.compiled.graph_pass import FuseNeighbours
from normforge.upstream import torch_inductor
from normforge.upstream.torch_inductor import installed

from ..calling import in_threads, printed
from ..thorough import THOROUGH
from .graphs import ADD, WIDTH, Stack, gradients


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    torch._dynamo.reset()
    with normforge.compile_passes(False), inductor.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


class Seen(CustomGraphPass):
    """A user's own pass, which notes what operators it is shown."""

    def __init__(self, known_as: str | None = "seen") -> None:
        self.known_as = known_as
        self.targets: list[list[str]] = []

    def __call__(self, graph: Graph) -> None:
        self.targets.append([str(node.target) for node in graph.nodes])

    def uuid(self) -> Any:
        return self.known_as

    def count(self, target: str) -> list[int]:
        return [sum(target in each for each in targets) for targets in self.targets]


def with_biases() -> torch.nn.Module:
    """The gradient of a bias comes from the norm behind the layer.

    Inductor keeps to what it was told of an operator's arguments: of the list of results too, which grows.
    """
    linear = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return torch.nn.Sequential(linear[0], normforge.LayerNorm(WIDTH), linear[1], normforge.RMSNorm(WIDTH))


@THOROUGH
@pytest.mark.parametrize(
    ("make", "mode", "joined", "count"),
    [(Stack, "default", ADD, 5), (Stack, "reduce-overhead", ADD, 5), (with_biases, "default", "aten.sum", 2)],
)
def test_inductor_runs_it_forward_and_backward_with_what_was_there(
    make: Callable[[], torch.nn.Module], mode: str, joined: str, count: int
) -> None:
    model, before, behind = make(), Seen(), Seen()
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    expected = model(x)
    theirs: dict[str, Any] = {"post_grad_custom_pre_pass": before, "post_grad_custom_post_pass": behind}
    with inductor.patch(**theirs, force_disable_caches=True), normforge.compile_passes():
        actual = torch.compile(model, fullgraph=True, mode=mode)(x)
        ours = gradients(model, x, actual)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, gradients(model, x, expected), rtol=1e-4, atol=1e-5)
    for seen in (before, behind):
        assert seen.count(joined) == [0, 0]
        assert seen.count("norm2d_fwd") == [count, 0]
        assert seen.count("norm2d_bwd") == [0, count]


def test_it_holds_until_a_with_ends_and_leaves_what_was_there() -> None:
    seen = Seen()
    for before in (None, seen):
        with inductor.patch(post_grad_custom_pre_pass=before):
            with normforge.compile_passes():
                assert isinstance(installed(), FuseNeighbours)
                with normforge.compile_passes(False):
                    assert installed() is before
                with normforge.compile_passes():
                    assert installed().before is before
                assert isinstance(installed(), FuseNeighbours)
            assert installed() is before
    assert installed() is None


def test_patch_switches_it_on_unless_told_otherwise() -> None:
    assert not normforge.patch(torch.nn.Sequential(torch.nn.ReLU())).swapped
    normforge.patch(torch.nn.Sequential(torch.nn.LayerNorm(8)), compile_passes=False)
    assert installed() is None
    normforge.patch(torch.nn.Sequential(torch.nn.LayerNorm(8)))
    assert isinstance(installed(), FuseNeighbours)


def test_a_pass_that_came_afterwards_is_taken_along_by_another_call() -> None:
    seen = Seen()
    with normforge.compile_passes(), inductor.patch(post_grad_custom_pre_pass=seen), normforge.compile_passes():
        assert installed().before is seen


def test_caches_know_it_and_what_was_there() -> None:
    alone, beside = FuseNeighbours(), FuseNeighbours(Seen("a"))
    assert alone.uuid()
    assert alone.uuid() == FuseNeighbours().uuid()
    assert len({alone.uuid(), beside.uuid(), FuseNeighbours(Seen("b")).uuid()}) == 3
    # Inductor caches nothing then, as it would not with that pass alone.
    assert FuseNeighbours(lambda graph: None).uuid() is FuseNeighbours(Seen(None)).uuid() is None


def test_a_process_that_may_make_no_kernels_is_known_by_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FuseNeighbours().uuid()
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    assert FuseNeighbours().uuid() != usual


def test_other_threads_run_it_too() -> None:
    """Autograd compiles the backward graph of CUDA tensors in a thread of its own."""
    with normforge.compile_passes():
        (found,) = in_threads(lambda _: installed(), [0])
    assert isinstance(found, FuseNeighbours)


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0+cu130"])
def test_with_an_unknown_torch_nothing_is_rewritten_and_it_says_so_once(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = torch_inductor.reason_against(version)
    assert reason == f"torch {version} is none of those that they were tried on ({', '.join(torch_inductor.KNOWN)})"
    monkeypatch.setattr(torch_inductor, "reason_against", lambda: reason)
    monkeypatch.setattr(switch, "_said", False)
    with pytest.warns(UserWarning, match=r"^normforge leaves torch.compile's graphs as they are: torch 2"):
        normforge.compile_passes()
    assert installed() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normforge.compile_passes()


@THOROUGH
def test_whoever_compiles_nothing_does_not_import_inductor() -> None:
    code = """
import sys, normforge
normforge.compile_passes()
before = "torch._inductor" in sys.modules
import torch, normforge.compiled.rules
normforge.compiled.rules.LEAST_ELEMENTS = 0
torch.compile(normforge.RMSNorm(8))(torch.randn(2, 8))
import torch._inductor.config as inductor
print(before, type(inductor.post_grad_custom_pre_pass).__name__)
"""
    assert printed(code) == "False FuseNeighbours"


CACHED = """
import torch, normforge
from torch._dynamo.utils import counters
from normforge.compiled import rules
rules.LEAST_ELEMENTS = 0
torch._inductor.config.compile_threads = 1
norm, x = normforge.RMSNorm(16), torch.randn(2, 16, requires_grad=True)
for enabled in (True, False):
    torch._dynamo.reset()
    counters.clear()
    with normforge.compile_passes(enabled):
        torch.compile(norm)(x).sum().backward()
    print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], end=" ")
"""


@THOROUGH
def test_graphs_in_caches_are_told_apart(tmp_path: Path) -> None:
    """Two processes each compile a norm with passes and without: the second finds both in the first one's caches."""
    local = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    assert [printed(CACHED, **local).strip() for _ in range(2)] == ["0 2 0 2", "2 0 2 0"]

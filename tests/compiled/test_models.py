"""Whole models with their norms' neighbours joined: as many additions as there are, and gradients as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normforge
from normforge.compiled import rules

from ..calling import each_device
from ..nn.models import GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, T5LayerNorm, randomised
from ..thorough import THOROUGH
from .graphs import ADD, WIDTH, Block, Compiled, PostNorm, Stack, gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def rows(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(size or (2, 3)), WIDTH, dtype=dtype, requires_grad=True)


# Of bf16 rows: each way rounds in other places.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def agree(actual: Any, expected: Any) -> None:
    """Fail unless tensors are alike, each measured by its largest value."""
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= TOLERANCE[a.dtype] * b.abs().max()


def kept(graph: torch.fx.Graph) -> list[tuple[Any, ...]]:
    """What a forward graph returns, among it what is kept for the backward one."""
    (returned,) = graph.output_node().args
    assert isinstance(returned, (list, tuple))
    return [(node.meta["val"].shape, node.meta["val"].dtype) for node in returned if isinstance(node, torch.fx.Node)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=THOROUGH)], ids=str)
def test_every_addition_of_a_stack_joins_forward_and_backward(dtype: torch.dtype) -> None:
    model, x = Stack().to(dtype), rows(dtype=dtype)
    found = {}
    for rewrite in (False, True):
        torch._dynamo.reset()
        function = Compiled(model, rewrite=rewrite)
        y = function(x)
        found[rewrite] = function, [y, *gradients(model, x, y)]
    (plain, expected), (function, actual) = found[False], found[True]
    assert [plain.count(ADD, graph) for graph in (0, 1)] == [4, 4]
    assert [function.count(ADD, graph) for graph in (0, 1)] == [0, 0]
    assert function.joined == {"join_sum": 4, "join_gradient": 4}
    assert [function.count("norm2d_fwd", 0), function.count("norm2d_bwd", 1)] == [5, 5]
    agree(actual, expected)
    # Nothing else is kept than was, or more of it.
    assert kept(function.graphs[0]) == kept(plain.graphs[0])


def hold(function: Any, model: torch.nn.Module, x: torch.Tensor) -> None:
    """Fail unless a compiled call returns what an eager one does, and gradients by x and parameters are alike."""
    y, expected = function(x), model(x)
    agree([y, *gradients(model, x, y)], [expected, *gradients(model, x, expected)])


class Broken(torch.nn.Module):
    """Two blocks that are compiled in several graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        z: torch.Tensor = self.second(y)
        return z


class Checkpointed(Block):
    """A block that is computed again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y * 2


RESIDUAL = torch.linspace(-1, 1, 6 * WIDTH).view(2, 3, WIDTH)


class BehindASum(Block):
    """A block of a sum with a residual that requires no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(RESIDUAL + x)


# By what is compiled: options, calls' first dimensions, and how often each rule applies in each graph.
MODELS: list[tuple[Callable[[], torch.nn.Module], dict[str, Any], tuple[int, ...], list[dict[str, int]]]] = [
    (Stack, {"dynamic": True}, (2, 5, 7), [{"join_sum": 4}, {"join_gradient": 4}]),
    (Checkpointed, {}, (2,), [{"join_sum": 1}, {"join_sum": 1, "join_gradient": 2}]),
    (
        Broken,
        {"fullgraph": False},
        (2,),
        [{"join_sum": 1}, {"join_sum": 1}, {"join_gradient": 2}, {"join_gradient": 2}],
    ),
    (BehindASum, {}, (2,), [{"join_sum": 2}, {"join_gradient": 2}]),
    # No sum is left for the norms behind; a kernel of two norms needs a size that is known.
    (PostNorm, {"dynamic": True}, (2, 5), [{"join_post_add": 2}, {"join_gradient": 2}]),
    (PostNorm, {}, (2,), [{"join_post_add": 2, "join_next_norm": 1}, {"join_gradient": 2}]),
]


@THOROUGH
@pytest.mark.parametrize(("make", "options", "sizes", "joined"), MODELS)
def test_what_joins_in_each_graph(
    make: Callable[[], torch.nn.Module], options: dict[str, Any], sizes: tuple[int, ...], joined: list[dict[str, int]]
) -> None:
    model = make()
    function = Compiled(model, **options)
    for m in sizes:
        hold(function, model, rows(m, 3))
    assert [{rule: many for rule, many in applied.items() if many} for applied in function.applied] == joined


@THOROUGH
def test_without_gradients() -> None:
    model, x = Stack(), rows()
    function = Compiled(model)
    with torch.no_grad():
        agree([function(x)], [model(x)])
    assert [str(node.args[5]) for node in function.graphs[0].nodes if "layernorm2d_fwd" in str(node.target)] == [
        "pre_add"
    ]
    assert function.joined == {"join_sum": 4}


@THOROUGH
def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters of fp32, whose gradients are rounded on their way."""
    monkeypatch.setitem(TOLERANCE, torch.float32, 5e-2)
    model, x = Stack(), rows()
    function = Compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        hold(function, model, x)
    assert [function.count(ADD, graph) for graph in (0, 1)] == [0, 0]


class WithDropout(Block):
    """A block that drops some of what its branches add."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + torch.nn.functional.dropout(branch(norm(x)), 0.5)
        return x


@THOROUGH
def test_dropout_stays_in_the_kernel_of_its_addition() -> None:
    """Only backward is there anything to gain, where what dropout needs is not added but multiplied by."""
    model, x = WithDropout(), rows()
    function = Compiled(model)
    gradients(model, x, function(x))
    assert function.joined == {"join_gradient": 2}


@pytest.mark.parametrize("cls", [LlamaRMSNorm, Olmo2RMSNorm, GemmaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, pytest.param(torch.float32, marks=THOROUGH)], ids=str)
@each_device
def test_what_a_model_wrote_out_is_left_as_it_wrote_it(
    device: str, cls: type[torch.nn.Module], weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operator for operator, forward and backward: what is compiled is what the model has unpatched.

    On a card too, where another release of torch traces than where these tests run without one.
    """
    left = rules.Left("rms", torch.bfloat16, 1, 64, scaled=True, recorded=True)
    monkeypatch.setattr(rules, "LEFT_TO_INDUCTOR", (left,))
    model = randomised(cls()).to(device, weight_dtype)
    x = rows(dtype=torch.bfloat16).detach().to(device).requires_grad_()
    found = []
    for patched in (False, True):
        if patched:
            assert normforge.patch(model, compile_passes=False).swapped
        torch._dynamo.reset()
        with normforge.compile_passes():
            function = Compiled(model)
            y = function(x)
            results = [y, *gradients(model, x, y)]
        operators = [sorted(str(node.target) for node in graph.nodes) for graph in function.graphs]
        found.append((operators, results))
    (expected_graphs, expected), (graphs, actual) = found
    assert graphs == expected_graphs
    assert all(map(torch.equal, actual, expected))


@THOROUGH
def test_small_norms_are_left_and_those_of_a_size_that_varies_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(), rows()
    for least, dynamic, ours in ((x.numel(), False, 5), (x.numel() + 1, False, 0), (x.numel() + 1, True, 5)):
        monkeypatch.setattr(rules, "LEAST_ELEMENTS", least)
        torch._dynamo.reset()
        with normforge.compile_passes():
            function = Compiled(model, dynamic=dynamic)
            hold(function, model, x)
            assert function.count("norm2d_fwd") == ours
            function(rows(8, 3))
            assert len(function.graphs) == (2 if dynamic else 3)


@pytest.mark.parametrize(
    ("n", "scaled", "enabled", "left"),
    [
        (2048, True, True, True),
        (1024, True, True, True),
        (2048, True, False, False),
        (2056, True, True, False),
        (2048, False, True, False),
    ],
)
def test_the_rules_are_of_what_was_measured(n: int, scaled: bool, enabled: bool, left: bool) -> None:
    x = torch.empty(3, n, dtype=torch.bfloat16)
    with normforge.compile_passes(enabled):
        assert rules.is_left_to_inductor("rms", x, (n,), scaled=scaled) == left
        assert not rules.is_left_to_inductor("rms", x.float(), (n,), scaled=scaled)
        with torch.no_grad():
            assert not rules.is_left_to_inductor("rms", x, (n,), scaled=scaled)

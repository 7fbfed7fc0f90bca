"""Heads of a packed qkv in a traced graph: no copy before the operator, one graph for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import normforge

from ..calling import same_bits
from ..thorough import THOROUGH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, HEADS, ALL_HEADS = 40, 2, 4


def heads(qkv: torch.Tensor) -> torch.Tensor:
    return qkv.view(qkv.shape[0], ALL_HEADS, N)[:, :HEADS]


def functional(qkv: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return normforge.rms_norm(heads(qkv), (N,), weight, 1e-6)


def written(qkv: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q = heads(qkv)
    normforge.layernorm2d_fwd(q, weight, out=q)
    return qkv * 2


@pytest.mark.parametrize("function", [functional, pytest.param(written, marks=THOROUGH)])
def test_one_graph_without_a_copy(function: Callable[..., torch.Tensor]) -> None:
    backend = EagerAndRecordGraphs()
    compiled: Any = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    weight = torch.randn(N)
    for tokens in (2, 3, 5):
        qkv = torch.randn(tokens, ALL_HEADS * N)
        assert same_bits(compiled(qkv.clone(), weight), function(qkv.clone(), weight))
    (graph,) = backend.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
    assert [name for name in called if "normforge" in name]
    assert not [name for name in called if name in ("clone", "copy_")]


@THOROUGH
def test_gradients_on_strides_of_their_own() -> None:
    compiled: Any = torch.compile(functional, backend="aot_eager", fullgraph=True)
    qkv, weight = torch.randn(3, ALL_HEADS * N, requires_grad=True), torch.randn(N, requires_grad=True)
    dy = torch.randn(HEADS, 3, N).transpose(0, 1)
    found = torch.autograd.grad(compiled(qkv, weight), (qkv, weight), dy)
    expected = torch.autograd.grad(functional(qkv, weight), (qkv, weight), dy)
    assert all(same_bits(got, want) for got, want in zip(found, expected, strict=True))

"""The plug of vLLM, beside a stand-in of its registries and, where it is installed, beside vLLM.

vLLM's wheel is CUDA's. What runs of it on a CPU, and is run here, is its IR, where providers are, its norms as modules,
its registry of their classes, and its pass that lowers a graph to providers.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from normforge.integrations import serving
from normforge.integrations import vllm as plug

from ..nn.models import randomised
from .engines import Leaves, N, alike, rows
from .stand_ins import of_vllm

EPS = 1e-5


@pytest.fixture
def ops(layers: Any) -> Any:
    """The module of operators of vLLM's IR, providers registered."""
    return sys.modules["vllm.ir.ops"]


@pytest.mark.parametrize("weight", [None, torch.bfloat16, torch.float32], ids=str)
def test_providers_compute_what_native_ones_do(ops: Any, ran: list[str], weight: torch.dtype | None) -> None:
    x, residual = rows(), rows()
    w = None if weight is None else torch.randn(N).to(weight)
    for name, operands in (("rms_norm", (x,)), ("fused_add_rms_norm", (x, residual))):
        op = getattr(ops, name)
        before = [operand.clone() for operand in operands]
        with op.set_priority(["normforge", "native"]):
            native = op.impls["native"].impl_fn(*operands, w, EPS)
            if name == "fused_add_rms_norm":
                # Ours is the norm of the sum that is stored, vLLM's native one of the sum before it is rounded.
                native = ops.rms_norm.impls["native"].impl_fn(native[1], w, EPS), native[1]
            alike(op(*operands, w, EPS), native)
        # They write into no argument.
        assert all(torch.equal(*pair) for pair in zip(operands, before, strict=True))
    assert ran == ["rmsnorm2d_fwd"] * 2


def test_what_providers_do_not_take_is_native(ops: Any, ran: list[str]) -> None:
    x, w = rows(), torch.randn(N).bfloat16()
    calls = [
        ("rms_norm", (x, w, EPS, N // 2)),
        ("rms_norm", (x, w.half(), EPS)),
        ("rms_norm", (x.double(), w.double(), EPS)),
        ("fused_add_rms_norm", (x, x.float(), w, EPS)),
        ("fused_add_rms_norm", (x, x, w, EPS, N // 2)),
    ]
    for name, arguments in calls:
        op = getattr(ops, name)
        with op.set_priority(["normforge", "native"]):
            alike(op(*arguments), op.impls["native"].impl_fn(*arguments))
    assert ran == []


def test_a_provider_is_one_operator_where_vllm_lowers_a_graph(ops: Any) -> None:
    """Where it lowers a graph, vLLM puts what an implementation does with fake tensors in the place of its own node."""
    w = torch.randn(N).bfloat16()
    for name, operands in (("rms_norm", (rows(), w)), ("fused_add_rms_norm", (rows(), rows(), w))):
        implementation = getattr(ops, name).impls["normforge"].impl_fn
        graph = make_fx(lambda *each, run=implementation: run(*each, EPS), tracing_mode="fake")(*operands).graph
        targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert "normforge.rmsnorm2d_fwd.default" in targets
        assert not [target for target in targets if "rsqrt" in target]


def test_a_kernel_that_may_not_be_compiled_leaves_the_call_to_vllm(ops: Any, leaves: Leaves) -> None:
    op, x = ops.fused_add_rms_norm, rows()
    native, given = op.impls["native"].impl_fn, (x, x, None, EPS)
    with op.set_priority(["normforge", "native"]):
        leaves(serving, "rmsnorm2d_fwd", lambda: (op(*given), native(*given)), "calls to vLLM's own norms")


def test_vllm_starts_with_operators_of_another_release(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return x

    other.__annotations__ = {"x": torch.Tensor, "weight": torch.Tensor, "epsilon": float, "return": torch.Tensor}
    of_vllm.stand_in(monkeypatch)
    ops: Any = sys.modules["vllm.ir.ops"]
    monkeypatch.setattr(ops, "rms_norm", of_vllm.Op(other, False))
    caplog.set_level(logging.INFO, "vllm.normforge")
    plug.register()
    assert "normforge provides no rms_norm for this vLLM" in caplog.text
    assert "offers providers of vLLM IR's fused_add_rms_norm;" in caplog.text

    monkeypatch.delitem(sys.modules, "vllm.ir.ops")
    monkeypatch.delattr(sys.modules["vllm.ir"], "ops")
    plug.register()
    assert "this vLLM has no IR of RMSNorm" in caplog.text


LAYER = [{}, {"bias": False, "dtype": torch.bfloat16}, {"elementwise_affine": False}]


@pytest.mark.parametrize("layers", ["stand-in"], indirect=True)
@pytest.mark.parametrize("options", LAYER, ids=["plain", "unbiased", "bare"])
def test_layer_norms_are_made_of_our_class(layers: Any, ran: list[str], options: dict[str, Any]) -> None:
    norm: Any = randomised(layers.LayerNorm(N, **options))
    assert isinstance(norm, layers.LayerNorm)
    # The word that switches it in custom_ops.
    assert norm.name == "layer_norm"
    x = rows()
    with torch.inference_mode():
        alike(norm(x), layers.LayerNorm.forward_cuda(norm, x))
        assert ran == ["layernorm2d_fwd"]
        if norm.weight is not None:
            # A product of fp64's dtype.
            alike(norm.double()(x), layers.LayerNorm.forward_cuda(norm, x))
    assert ran == ["layernorm2d_fwd"]


@pytest.mark.parametrize("layers", ["bare"], indirect=True)
@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
def test_rms_norms_are_made_of_our_classes_without_an_ir(layers: Any, ran: list[str], name: str) -> None:
    theirs = getattr(layers, name)
    norm = theirs(N, dtype=torch.bfloat16)
    assert norm.name == theirs.name
    norm.weight.data = torch.randn_like(norm.weight)
    with torch.inference_mode():
        x, residual = rows(), rows()
        alike(norm(x), theirs.forward_cuda(norm, x))
        # Ours is the norm of the sum that is stored, vLLM's that of the sum before it is rounded.
        _, total = theirs.forward_cuda(norm, x, residual)
        alike(norm(x, residual), (theirs.forward_cuda(norm, total), total))
        compiled: Any = torch.compile(norm, backend="eager", fullgraph=True)
        alike(compiled(x), norm(x), bits=1.0)
        norm.weight.data = norm.weight.half()
        alike(norm(x), theirs.forward_cuda(norm, x), bits=1.0)
    assert ran == ["rmsnorm2d_fwd"] * 4


@pytest.mark.parametrize(
    ("named", "others", "says"),
    [("", [], "VLLM_PLUGINS does not name it"), ("normforge", ["LayerNorm"], "normforge serves no LayerNorm")],
    ids=["not named", "another plugin's class"],
)
def test_layer_norms_are_left_alone(
    named: str, others: list[str], says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_vllm.stand_in(monkeypatch)
    monkeypatch.setenv("VLLM_PLUGINS", named)
    registry: Any = sys.modules[of_vllm.CUSTOM]
    theirs = {
        name: registry.CustomOp.register_oot(name=name)(type("Other", (registry.CustomOp,), {})) for name in others
    }
    with caplog.at_level(logging.INFO, "vllm.normforge"):
        plug.register()
    assert registry.op_registry_oot == theirs
    assert "normforge" in sys.modules["vllm.ir.ops"].rms_norm.impls
    assert says in caplog.text


@pytest.mark.parametrize("layers", ["own"], indirect=True)
def test_vllms_own_norms_are_served(layers: Any, ran: list[str]) -> None:
    ir = importlib.import_module("vllm.ir")
    x, residual = rows(), rows()
    norm, layer = layers.RMSNorm(N, dtype=x.dtype), layers.LayerNorm(N)
    # Before 0.33 its LayerNorm is torch's, and no class can take its place.
    swapped = hasattr(layer, "forward_native")
    due = norm(x), norm(x + residual), x + residual, layer.forward_native(x) if swapped else layer(x)
    assert ran == []
    assert not swapped or layer.name == "layer_norm"
    with (
        torch.inference_mode(),
        ir.ops.rms_norm.set_priority(["normforge", "native"]),
        ir.ops.fused_add_rms_norm.set_priority(["normforge", "native"]),
    ):
        last = layer.forward_cuda(x) if swapped else layer(x)
        alike((norm(x), *norm(x, residual), last), due)
    assert ran == ["rmsnorm2d_fwd"] * 2 + ["layernorm2d_fwd"] * swapped

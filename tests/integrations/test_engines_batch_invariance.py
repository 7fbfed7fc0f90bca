"""Where an engine's own switch asks for batch invariance, kernels that serve it are batch invariant."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import normforge
from normforge.calls import attempt
from normforge.errors import InvarianceError
from normforge.integrations import sglang, vllm
from normforge.kernels import pipelines
from normforge.selection import dispatch, invariance

from ..thorough import THOROUGH
from .stand_ins import of_sglang, of_vllm

# Few rows of these and many have other tiles, and other bits, unless they are to have the same.
N = 131


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had asked for batch invariance yet, and nobody had after it."""
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    for name, fresh in (("_process", False), ("anywhere", False), ("followed", frozenset())):
        monkeypatch.setattr(invariance, name, fresh)
    yield
    dispatch.forget()


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of vLLM's norms."""
    of_vllm.stand_in(monkeypatch)
    monkeypatch.setenv("VLLM_PLUGINS", "normforge")
    return sys.modules[of_vllm.LAYERS]


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(257, N, generator=generator) + 10).to(dtype)


def agree(norm: Any) -> bool:
    """Whether a norm gives all of some rows the same bits in a small batch as in a large one."""
    x = rows()
    few, many = norm(x[:9]), norm(x)
    return torch.equal(few, many[:9])


def test_vllms_switch_is_followed_by_what_was_called_before(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = rows()[0]
    provider = partial(vllm.rms_norm, weight=weight, epsilon=1e-6)
    vllm.register()
    layer = layers.LayerNorm(N)
    with torch.inference_mode():
        assert (agree(provider), agree(layer)) == (False, False)
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        vllm.register()
        assert (agree(provider), agree(layer)) == (True, True)
    # What is no engine's too.
    assert agree(partial(normforge.layer_norm, normalized_shape=(N,)))
    graph = make_fx(partial(vllm.rms_norm, epsilon=1e-6), tracing_mode="fake")(rows(), weight).graph
    operators = [str(node.target) for node in graph.nodes if "normforge" in str(node.target)]
    assert operators == ["normforge.rmsnorm2d_fwd_invariant.default"]
    with pytest.raises(InvarianceError, match=r"NORMFORGE_BATCH_INVARIANT, VLLM_BATCH_INVARIANT, or batch_invariant"):
        normforge.layer_norm(rows().double(), (N,))
    with normforge.batch_invariant(False):
        assert not agree(provider)


@pytest.mark.parametrize("setting", ["", "0"])
def test_a_switch_that_is_off_changes_nothing(layers: Any, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", setting)
    vllm.register()
    assert not invariance.is_on()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=THOROUGH)])
def test_what_quantises_follows_the_switch_where_nothing_was_registered(
    layers: Any, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    norm, layer = layers.RMSNorm(N), torch.nn.Linear(N, N)
    layer._input_quant_key = of_vllm.KEYS["kFp8DynamicTokenSym"]  # type: ignore[assignment]  # as vLLM sets it

    def scales(x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = vllm.maybe_fused_norm_quant(norm, x, layer).scale
        return scale

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    torch._dynamo.reset()
    assert agree(torch.compile(scales, backend="aot_eager", fullgraph=True) if compiled else scales)
    assert invariance.is_on()


def test_what_cannot_be_kept_is_left_to_vllm_and_said(
    layers: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More rows than kernels that look at no batch can count."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    vllm.register()
    monkeypatch.setattr(pipelines, "MOST_ROWS_IN_I32", 100)
    monkeypatch.setattr(attempt, "_said", set())
    ops: Any = sys.modules["vllm.ir.ops"]
    found = vllm.rms_norm(rows(), None, 1e-6)
    assert torch.equal(found, ops.rms_norm.impls["native"].impl_fn(rows(), None, 1e-6))
    (said,) = [record.getMessage() for record in caplog.records if record.name == "normforge"]
    assert said.startswith("normforge leaves calls to vLLM's own norms: rms_fwd_fp32 at N = 131 is to be")
    assert "batch invariant (NORMFORGE_BATCH_INVARIANT, an engine's switch" in said


def test_sglangs_mode_is_followed(sglangs: Any, monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> None:
    norm = sglangs.RMSNorm(N)
    with torch.inference_mode():
        assert not agree(norm)
        monkeypatch.setattr(sglangs, "is_batch_invariant_mode_enabled", lambda: True)
        assert agree(norm)
    assert ran == ["rmsnorm2d_fwd"] * 4
    with pytest.raises(InvarianceError, match="--enable-deterministic-inference"):
        normforge.layer_norm(rows().double(), (N,))


def test_sglangs_own_mode_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = pytest.importorskip("sglang.srt.batch_invariant_ops", reason="SGLang is not installed")
    module = pytest.importorskip(of_sglang.LAYERS, reason="SGLang is not installed")
    monkeypatch.setattr(module, "get_exec", of_sglang.executed)
    assert sglang._serves_as_asked()
    assert not invariance.is_on()
    # As its switch sets it; the operators of torch's that it replaces besides want a GPU.
    monkeypatch.setattr(sys.modules[ops.enable_batch_invariant_mode.__module__], "_batch_invariant_MODE", True)
    assert module.is_batch_invariant_mode_enabled()
    assert sglang._serves_as_asked()
    assert invariance.is_on()
    monkeypatch.setattr(module, "get_exec", partial(of_sglang.executed, "fsdp"))
    assert not sglang._serves_as_asked()

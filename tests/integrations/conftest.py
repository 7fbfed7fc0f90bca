"""Which calls of engines' norms kernels served."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from normforge.calls import attempt
from normforge.errors import FrozenError
from normforge.integrations import serving, sglang, vllm

from ..calling import counted
from .engines import Leaves, alike
from .stand_ins import of_sglang, of_vllm


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that served calls, in the order in which they ended."""
    plain = ((serving, name, name) for name in ("layernorm2d_fwd", "rmsnorm2d_fwd"))
    return counted(
        monkeypatch, *plain, *((vllm, name, name) for name in ("quantised_layer_norm", "quantised_rms_norm"))
    )


@pytest.fixture(params=["stand-in", "own"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of vLLM's norms, imported when the plug is registered; vLLM's own in a configuration of vLLM's."""
    monkeypatch.setenv("VLLM_PLUGINS", "normforge")
    within: Any = nullcontext()
    if request.param != "own":
        of_vllm.stand_in(monkeypatch, bare=request.param == "bare")
    else:
        config = pytest.importorskip("vllm.config", reason="vLLM is not installed")
        within = config.set_current_vllm_config(
            config.VllmConfig(device_config=config.DeviceConfig("auto" if torch.cuda.is_available() else "cpu"))
        )
    # Every process calls it, and some twice.
    vllm.register()
    vllm.register()
    with within:
        yield importlib.import_module(of_vllm.LAYERS)


@pytest.fixture
def sglangs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of SGLang's norms, a stand-in with hooks applied."""
    of_sglang.stand_in(monkeypatch)
    monkeypatch.setenv("SGLANG_PLUGINS", "another, normforge")
    sglang.register()
    sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
    return sys.modules[of_sglang.LAYERS]


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Leaves:
    """Return what holds calls whose kernel may not be compiled to the engine's own results."""

    def hold(module: Any, name: str, call: Callable[[], tuple[Any, Any]], what: str) -> None:
        monkeypatch.setattr(module, name, Mock(side_effect=FrozenError("it would have to be compiled")))
        monkeypatch.setattr(attempt, "_said", set())
        for _ in range(2):
            alike(*call(), bits=1.0)
        says = [record.getMessage() for record in caplog.records if record.name == "normforge"]
        assert says == [f"normforge leaves {what}: it would have to be compiled"]

    return hold

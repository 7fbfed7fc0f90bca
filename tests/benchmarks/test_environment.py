"""What the header of results says of torch's own choice of kernels."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.environment import describe
from normforge.tools.machine import Machine

KEY = "torch rms_norm"
MACHINE = Machine(torch.device("cpu"), "CPU", interpreted=True)


def header(monkeypatch: pytest.MonkeyPatch, operations: dict[str, list[str]]) -> dict[str, str]:
    registry: Any = ModuleType("torch._native.registry")
    registry.get_dsl_operations = lambda dsl: operations.get(dsl, [])
    monkeypatch.setitem(sys.modules, "torch._native", ModuleType("torch._native"))
    monkeypatch.setitem(sys.modules, "torch._native.registry", registry)
    return describe(MACHINE, (), "1")


def test_quacks_kernels_in_torchs_rms_norm_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert header(monkeypatch, {"cutedsl": ["_fused_rms_norm", "topk"]})[KEY] == "QuACK's"
    assert header(monkeypatch, {"cutedsl": ["topk"], "triton": ["_fused_rms_norm"]})[KEY] == "its own"


def test_a_torch_that_has_one_kernel_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._native.registry", None)
    assert KEY not in describe(MACHINE, (), "1")


def test_this_torch_answers() -> None:
    # Its registry is private: from 2.13 on it is asked, and without a GPU it overrides nothing.
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert describe(MACHINE, (), "1").get(KEY) == ("its own" if version >= (2, 13) else None)

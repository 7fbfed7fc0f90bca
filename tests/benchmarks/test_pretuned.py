"""Helion's pretuned kernels as a peer, by stand-ins of its package and of a checkout, with the kernels' signatures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.cells import Cell, Norm, QuantisedCell, Task
from benchmarks.providers import find_providers

from .small import holds_to_the_oracle

PEER = "helion"
VARIABLE = "NORMFORGE_HELION"

# By the name of a kernel, its file; what is written over is as in a checkout.
STAND_INS = {
    "layer_norm": """
@helion.aot_kernel()
def layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
""",
    "rms_norm": """
@helion.aot_kernel()
def rms_norm(x, weight, eps=1e-5):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
""",
    "rms_norm_dynamic_per_token_quant": """
@helion.aot_kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def rms_norm_dynamic_per_token_quant(result, input, weight, scale, epsilon, scale_ub=None, residual=None):
    assert input.ndim == 2 and scale.shape == (len(input), 1) and scale_ub is None
    total = input if residual is None else residual.add_(input)
    y = torch.nn.functional.rms_norm(total.float(), total.shape[-1:], weight.float(), epsilon)
    most = 127 if result.dtype == torch.int8 else 448
    scale.copy_(y.abs().amax(-1, keepdim=True) / most)
    quantised = y / scale
    result.copy_(quantised.round() if result.dtype == torch.int8 else quantised)
""",
    "rms_norm_per_block_quant": """
@helion.aot_kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def rms_norm_per_block_quant(
    result, input, weight, scale, epsilon, scale_ub, residual, group_size, is_scale_transposed
):
    assert input.ndim == 2 and scale.shape == (len(input), input.shape[1] // group_size) and scale_ub is None
    assert group_size in (64, 128) and is_scale_transposed == (scale.stride(1) > 1)
    total = input if residual is None else residual.add_(input)
    y = torch.nn.functional.rms_norm(total.float(), total.shape[-1:], weight.float(), epsilon)
    y = y.view(len(y), -1, group_size)
    scale.copy_(y.abs().amax(-1) / 448)
    result.copy_((y / scale.unsqueeze(-1)).view_as(result))
""",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    helion: Any = ModuleType("helion")
    helion.exc = SimpleNamespace(TensorOperationInWrapper=None)
    helion.aot_kernel = lambda **_: lambda function: function
    monkeypatch.setitem(sys.modules, "helion", helion)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    # Set first, so that what the import sets is taken back.
    monkeypatch.setenv("HELION_AUTOTUNER", "")
    monkeypatch.delenv("HELION_AUTOTUNER")
    monkeypatch.delitem(sys.modules, "benchmarks.pretuned", raising=False)
    for name, text in STAND_INS.items():
        folder = tmp_path / "pretuned_kernels" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(f"import helion\nimport torch\n{text}")
        (folder / f"_helion_aot_{name}_cuda_sm90.py").write_text("")
    yield tmp_path
    sys.modules.pop("benchmarks.pretuned", None)


def test_its_kernels_compute_what_is_asked_of_them(checkout: Path) -> None:
    holds_to_the_oracle(
        PEER,
        *(Cell(Task.FORWARD, norm, 4, 256) for norm in Norm),
        Cell(Task.QUANT, Norm.RMS, 4, 256, out_dtype="int8"),
        Cell(Task.ADD_QUANT, Norm.RMS, 4, 256, out_dtype="fp8"),
        QuantisedCell(Task.QUANTISED, Norm.RMS, 4, 256),
        QuantisedCell(Task.QUANTISED, Norm.RMS, 4, 256, columns=128),
        QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 4, 256, columns=128, column_major=True),
    )


def test_a_search_that_needs_more_packages_is_not_made(checkout: Path) -> None:
    find_providers([PEER])
    assert os.environ["HELION_AUTOTUNER"] == "PatternSearch"


def test_a_gpu_without_a_configuration_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "has no configuration for sm80, only for ['90']" in find_providers([PEER])[1][PEER]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    assert list(find_providers([PEER])[0]) == [PEER]


def test_where_the_kernels_are_looked_for_is_said(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = checkout / "pretuned_kernels" / "rms_norm" / "rms_norm.py"
    kernel.write_text("import torch\n")
    assert find_providers([PEER])[1] == {PEER: f"{kernel} defines no rms_norm, as a checkout of Helion does"}
    kernel.unlink()
    assert f"there is no {kernel}; set {VARIABLE}" in find_providers([PEER])[1][PEER]
    elsewhere = checkout / "elsewhere"
    monkeypatch.setenv(VARIABLE, str(elsewhere))
    assert f"there is no {elsewhere / 'pretuned_kernels'}; set {VARIABLE}" in find_providers([PEER])[1][PEER]
    monkeypatch.delenv(VARIABLE)
    assert find_providers([PEER])[1][PEER].startswith(f"{VARIABLE} is not set")
    monkeypatch.setitem(sys.modules, "helion", None)
    assert "helion" in find_providers([PEER])[1][PEER]

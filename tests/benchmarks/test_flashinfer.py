"""FlashInfer as a peer, by a stand-in of its norms: the package's signatures, and what each writes over."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cells import Cell, Norm, QuantisedCell, Task
from benchmarks.providers import every_provider

from .small import holds_to_the_oracle


def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: None = None, enable_pdl: Any = None) -> Any:
    assert weight.dtype == input.dtype
    return F.rms_norm(input.float(), input.shape[-1:], weight.float(), eps).to(input.dtype)


def layernorm(input: Any, gemma: Any, beta: Any, eps: float = 1e-6) -> Any:
    assert (input.dtype, gemma.dtype, beta.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    return F.layer_norm(input.float(), input.shape[-1:], gemma, beta, eps).to(input.dtype)


def fused_add_rmsnorm(input: Any, residual: Any, weight: Any, eps: float = 1e-6, enable_pdl: Any = None) -> None:
    residual.add_(input)
    input.copy_(rmsnorm(residual, weight, eps))


def rmsnorm_quant(out: Any, input: Any, weight: Any, scale: Any, eps: float = 1e-6, enable_pdl: Any = None) -> None:
    out.copy_((rmsnorm(input, weight, eps).float() / scale).clamp(-448, 448))


def layernorm_quant(out: Any, input: Any, gemma: Any, beta: Any, scale: Any, eps: float = 1e-6) -> None:
    out.copy_((layernorm(input, gemma, beta, eps).float() / scale).clamp(-448, 448))


def fused_add_rmsnorm_quant(out: Any, input: Any, residual: Any, weight: Any, scale: Any, *others: Any) -> None:
    residual.add_(input)
    rmsnorm_quant(out, residual, weight, scale, *others)


def fused_add_rmsnorm_fp8_block_quant(
    out: Any, block_scale: Any, normed_out: Any, input: Any, residual: Any, weight: Any, *others: Any
) -> None:
    rows, columns = input.shape
    assert block_scale.shape == (columns // 128, -(-rows // 4) * 4)
    assert block_scale.is_contiguous()
    residual.add_(input)
    normed_out.copy_(rmsnorm(residual, weight, *others))
    groups = normed_out.float().view(rows, -1, 128)
    scales = groups.abs().amax(-1) / 448
    block_scale.fill_(float("nan"))[:, :rows] = scales.t()
    out.copy_((groups / scales.unsqueeze(-1)).view(rows, columns))


NORMS = (
    *(rmsnorm, layernorm, fused_add_rmsnorm, rmsnorm_quant, layernorm_quant),
    *(fused_add_rmsnorm_quant, fused_add_rmsnorm_fp8_block_quant),
)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    norm: Any = ModuleType("flashinfer.norm")
    norm._USE_CUDA_NORM = False
    for function in NORMS:
        setattr(norm, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)


GROUPS: dict[str, Any] = {"columns": 128, "column_major": True}
CELLS: dict[str, list[Cell]] = {
    "flashinfer": [
        *(Cell(Task.FORWARD, norm, 5, 256) for norm in Norm),
        Cell(Task.FORWARD, Norm.RMS, 8, 128, heads=(4, 6)),
        Cell(Task.ADD, Norm.RMS, 5, 256, "fp16"),
        *(QuantisedCell(Task.QUANTISED, norm, 5, 256, static=True) for norm in Norm),
        QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 5, 256, static=True),
    ],
    "flashinfer-both": [
        QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 5, 256, **GROUPS),
        QuantisedCell(Task.ADD_QUANTISED, Norm.RMS, 5, 256, unquantised=True, **GROUPS),
    ],
}


@pytest.mark.parametrize("peer", CELLS)
def test_its_norms_compute_what_is_asked_of_them(package: None, peer: str) -> None:
    holds_to_the_oracle(peer, *CELLS[peer])


def test_the_header_says_which_kernels_were_taken(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = every_provider()["flashinfer"]
    assert peer.version().endswith("(CuTe DSL kernels)")
    monkeypatch.setattr(sys.modules["flashinfer.norm"], "_USE_CUDA_NORM", True)
    assert peer.version().endswith("(CUDA kernels)")

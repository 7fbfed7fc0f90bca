"""torch.compile on a card, with inductor: whole graphs, no recompilation over M, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import normforge

from ..calling import FORWARD, each_function, each_norm, same_bits
from ..nn import models
from ..nn.decoders import made
from ..nn.models import WIDTH
from .test_torch_compile import N, compiled, sweep, trained, writes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _nothing_counted(fresh_dynamo: None) -> None:
    counters.clear()


def rows(m: int, n: int = N, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(m, n, device="cuda", dtype=dtype)


@each_function
def test_a_sweep_over_m_compiles_once_and_agrees_with_eager(norm: str) -> None:
    # On both sides of where an instance takes its other tile.
    sweep(norm, (2, 3, 512, 513, 5000), "inductor", "cuda")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@each_norm
def test_an_add_and_quantisation_between_what_inductor_fuses(norm: str, dtype: torch.dtype) -> None:
    def call(x: torch.Tensor, residual: torch.Tensor) -> Any:
        fused: dict[str, Any] = {"residual": residual, "fadd": 1, "fquant": 2, "out_dtype": dtype, "save_mv": True}
        out: Any = FORWARD[norm](x * 2, **fused)
        return (*out, out.y.float() * out.y_scale.unsqueeze(-1))

    function, counter = compiled(call, backend="inductor", dynamic=True)
    compilations = None
    for m in (2, 7, 600):
        x, residual = rows(m, 1500), rows(m, 1500)
        assert all(same_bits(a, b) for a, b in zip(function(x, residual), call(x, residual), strict=True))
        compilations = compilations or counter.frame_count
    assert counter.frame_count == compilations


def test_outputs_are_written_where_the_caller_says() -> None:
    writes("inductor", torch.float8_e4m3fn, torch.bfloat16, "cuda")


def new_step() -> None:
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call] # torch declares no types for it


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_patched_model_trains(mode: str) -> None:
    model = made("torch", device="cuda")
    normforge.patch(model)
    function = torch.compile(model, mode=mode, fullgraph=True)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(5):
        tokens = torch.randint(17, (4, 12), device="cuda", generator=generator)
        new_step()
        actual = trained(model, function, tokens)
        torch.testing.assert_close(actual, trained(model, model, tokens), rtol=1e-3, atol=1e-4)
    assert not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0


@each_norm
def test_cuda_graphs_of_a_forward_function(norm: str) -> None:
    weight = torch.randn(4096, device="cuda")

    def call(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return FORWARD[norm](x, weight, residual=residual, fadd=1, fquant=2, save_mv=True)

    function = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        x, residual = rows(16, 4096), rows(16, 4096)
        new_step()
        actual = [None if tensor is None else tensor.clone() for tensor in function(x, residual)]
        assert all(same_bits(a, b) for a, b in zip(actual, call(x, residual), strict=True))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_autocast_gives_the_types_that_eager_calls_give() -> None:
    layer, rms = normforge.LayerNorm(N).cuda(), normforge.RMSNorm(N).cuda()

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), rms(x)

    function, _ = compiled(call, backend="inductor")
    x = rows(5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual, expected = function(x), call(x)
    assert [y.dtype for y in actual] == [y.dtype for y in expected]
    assert actual[0].dtype == torch.float32
    assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_patched_hugging_face_norm() -> None:
    module = torch.nn.Sequential(models.LlamaRMSNorm()).cuda().bfloat16()
    normforge.patch(module)
    function, _ = compiled(module, backend="inductor")
    x = rows(5, WIDTH)
    torch.testing.assert_close(function(x), module(x), rtol=2e-2, atol=2e-2)

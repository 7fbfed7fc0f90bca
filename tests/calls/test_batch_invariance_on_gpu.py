"""On a card a row's results have the same bits in every batch: eager, compiled and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge

from ..calling import captured, there
from .batches import CALLS, Call, assert_same, group, hold_for, hold_wherever_it_lies, rows, vector

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo", "invariant")]

MS = (1, 2, 3, 7, 255, 256, 257, 1000, 4096)
# A row length or two of each pipeline, forward and backward, and what divides them into vectors, pairs or nothing.
NS = (64, 128, 129, 500, 1000, 1024, 2048, 4096, 4097, 4100, 5120, 8192, 12288, 16384, 20000, 40000, 131072)
MOST = MS[-1]
# Elements of a batch: 1 GiB of 16 bits.
MOST_ELEMENTS = 1 << 29


each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
each_type = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def batch_of(n: int, dtype: torch.dtype) -> torch.Tensor:
    return rows(min(MOST, MOST_ELEMENTS // n), n, dtype, "cuda")


@each_call
@each_type
@pytest.mark.parametrize("n", NS)
def test_a_row_has_the_same_bits_for_every_m(call: Call, dtype: torch.dtype, n: int) -> None:
    """At either end of a batch, and where no tile of rows begins."""
    x = batch_of(n, dtype)
    parts = [(first, first + m) for m in MS for first in {0, 5, x.shape[0] - m}]
    hold_for(call, x, [(first, last) for first, last in parts if first >= 0 and last <= x.shape[0]])


@each_call
@pytest.mark.parametrize("n", [128, 129, 1000, 4096, 4097, 8192])
def test_a_row_has_the_same_bits_wherever_it_lies(call: Call, n: int) -> None:
    """At every address that an element can have, too."""
    hold_wherever_it_lies(call, rows(64, n, torch.bfloat16, "cuda"), beside=(1, 8, 16, 24), ahead=range(1, 9))


@each_call
@pytest.mark.parametrize("n", [1024, 4096, 20000])
def test_a_cuda_graph_has_the_bits_of_eager_calls(call: Call, n: int) -> None:
    """Captured within, replayed outside."""
    x = rows(1000, n, torch.bfloat16, "cuda")
    batch = call(x)
    part = x[300:307].clone()
    call(part)
    graph, found = captured(lambda: call(part))
    with normforge.batch_invariant(False):
        graph.replay()
    assert_same(found, batch, slice(300, 307))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("n", [1024, 4096])
def test_compiled_training_has_the_bits_of_eager_calls(mode: str, n: int) -> None:
    """Of every M, with the passes on, which join nothing and leave nothing to Inductor; backward() runs outside."""
    weight = vector(1, rows(1, n, torch.bfloat16, "cuda")).requires_grad_()

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return normforge.rms_norm(x + residual, (n,), weight)

    compiled = torch.compile(block, dynamic=True, mode=mode)

    def trained(function: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = function(leaf, x.flip(-1))
        with normforge.batch_invariant(False):
            y.backward(x)
        return {"y": y.detach().clone(), "dx": there(leaf.grad).clone()}

    with normforge.compile_passes():
        x = batch_of(n, torch.bfloat16)
        batch = trained(block, x)
        for m in MS:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # as torch declares it
            assert_same(trained(compiled, x[5 : 5 + m]), batch, slice(5, min(5 + m, x.shape[0])))


@each_type
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(32, 8, 8), (320, 64, 64), (64, 33, 31), (128, 128, 128)])
def test_a_sample_of_group_norm(dtype: torch.dtype, channels_last: bool, shape: tuple[int, ...]) -> None:
    """Groups that a program holds, and those that several share."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(17, *shape, device="cuda", dtype=dtype).to(memory_format=memory_format)
    hold_for(group, x, ((0, 1), (16, 17), (3, 5), (1, 17)))

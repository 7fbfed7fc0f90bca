"""Calls of several threads at once give what each gives alone, in the interpreter too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import normforge

from ..calling import same_bits

THREADS, CALLS, N = 4, 10, 64


@pytest.fixture
def _impatient() -> Iterator[None]:
    """Let threads take turns so often that one is stopped within every launch."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs and gradients, of launches with one program a row, with a grid of sums, and of both norms."""
    y, total = normforge.add_rms_norm(normforge.layer_norm(x, (N,), weight, bias), x, weight)
    return (y, total, *torch.autograd.grad((y * total).sum(), (x, weight, bias)))


@pytest.mark.usefixtures("_impatient")
def test_threads_that_call_at_once() -> None:
    given = [
        [tensor.requires_grad_() for tensor in (torch.randn(3 + thread, N), torch.randn(N), torch.randn(N))]
        for thread in range(THREADS)
    ]
    expected = [step(*tensors) for tensors in given]
    start = Barrier(THREADS)

    def run(thread: int) -> int:
        start.wait()
        found = (step(*given[thread]) for _ in range(CALLS))
        return sum(all(map(same_bits, outputs, expected[thread])) for outputs in found)

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(run, range(THREADS))) == [CALLS] * THREADS

"""The steps from the tutorial's form to an emitted kernel: what they compute, and that they compile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cells import Cell, Norm, Task
from benchmarks.inputs import make_inputs
from benchmarks.oracle import expect
from benchmarks.provider import Provider
from benchmarks.providers.steps import BACKWARD as BACKWARD_STEPS
from benchmarks.providers.steps import FORWARD as FORWARD_STEPS
from benchmarks.providers.steps import PROVIDERS
from benchmarks.runner import prepare
from benchmarks.steps import backward, forward

from ..stand_in_driver import driving

FORWARD, BACKWARD = (
    [provider for provider in PROVIDERS if (task, Norm.LAYER) in provider.builders]
    for task in (Task.FORWARD, Task.BACKWARD)
)


# Bytes that a thread moves at once of x and y, and of weight and bias, where a row of 1000 bf16 columns is compiled.
WIDTHS = {
    **dict.fromkeys(("three sweeps", "held", "pivot"), (2, 2)),
    "exact N": (2, 16),
    **dict.fromkeys(("alignment", "several rows", "emitted"), (16, 16)),
}


# A row of one chunk, one whose stride only 8 divides, and one of two chunks of which the last is masked.
@pytest.mark.parametrize("n", [96, 1000, 1032])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("provider", [*FORWARD, *BACKWARD], ids=lambda provider: provider.name)
def test_steps_agree_with_the_oracle(provider: Provider, dtype: str, n: int) -> None:
    task, m, group = (Task.FORWARD, 3, "forward") if provider in FORWARD else (Task.BACKWARD, 7, "backward")
    inputs = make_inputs(Cell(task, Norm.LAYER, m, n, dtype, group=f"steps, {group}"), torch.device("cpu"))
    prepare(provider, [inputs], expect(inputs))


@pytest.mark.compile
@pytest.mark.parametrize("name", FORWARD_STEPS)
def test_loads_are_as_wide_as_the_page_says(name: str, ptx_of: Callable[[Callable[[], object]], str]) -> None:
    x, weight, bias = (torch.randn(*shape, 1000).bfloat16() for shape in ((8,), (), ()))
    ptx = ptx_of(lambda: FORWARD_STEPS[name](x, weight, bias, 1e-5))
    loads, stores = (re.findall(rf"\b{kind}\.global\.(?:v(\d)\.)?b(\d+)", ptx) for kind in ("ld", "st"))
    of_rows, of_operands = WIDTHS[name]
    assert {_bytes(found) for found in loads} == {of_rows, of_operands}
    assert {_bytes(found) for found in stores} == {of_rows}


@pytest.mark.compile
@pytest.mark.parametrize("name", BACKWARD_STEPS)
def test_gradients_compile(name: str, ptx_of: Callable[[Callable[[], object]], str]) -> None:
    x, weight, mean, rstd = torch.randn(8, 1032).bfloat16(), torch.randn(1032).bfloat16(), *torch.ones(2, 8)
    ptx = ptx_of(lambda: BACKWARD_STEPS[name](x, x, weight, mean, rstd))
    assert ("atom" in ptx) == (name == "locks")
    # Rows go to shared memory where two are ahead.
    assert ("cp.async" in ptx) == (name in ("rows ahead", "emitted"))


def _bytes(found: tuple[str, str]) -> int:
    vector, bits = found
    return int(vector or 1) * int(bits) // 8


@pytest.fixture
def ptx_of(tmp_path: Path) -> Iterator[Callable[[Callable[[], object]], str]]:
    """From what launches kernels to their PTX for an H200."""
    import triton

    def compiled(launch: Callable[[], object]) -> str:
        for kernel in (*vars(forward).values(), *vars(backward).values()):
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()
        with driving():
            launch()
        return "".join(path.read_text() for path in tmp_path.rglob("*.ptx"))

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield compiled

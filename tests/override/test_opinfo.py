"""PyTorch's own samples of its norms with kernels under them: fp64's numbers, and torch's types, shapes and strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ..calling import each_device
from ..conformance.test_opinfo import TOLERANCE, import_invocations, in_fp64
from ..thorough import THOROUGH
from .conftest import override

NAMES = ("nn.functional.layer_norm", "nn.functional.rms_norm", "native_layer_norm")


@pytest.fixture(scope="module")
def op_infos() -> dict[str, Any]:
    """The entries of PyTorch's table of operators, by name."""
    try:
        return {info.name: info for info in import_invocations().op_db if info.name in NAMES}
    except ImportError as error:
        pytest.skip(f"this PyTorch keeps its OpInfo samples elsewhere, or lacks what they need: {error}")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    yield from (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _called(info: Any, sample: Any) -> list[torch.Tensor]:
    """The results of a sample, and the gradients of the first."""
    results = list(_tensors(info.op(sample.input, *sample.args, **sample.kwargs)))
    y = results[0]
    leaves = [leaf for leaf in _tensors((sample.input, sample.args, sample.kwargs)) if leaf.requires_grad]
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape).to(y.dtype)
    return [*results, *torch.autograd.grad(y, leaves, dy)]


@each_device
@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=[] if dtype is torch.float32 else [THOROUGH]) for dtype in TOLERANCE], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, dtype: torch.dtype, device: str, op_infos: dict[str, Any], ran: list[str]) -> None:
    info, tolerance = op_infos[name], TOLERANCE[dtype]
    served = 0
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        expected, exact = _called(info, sample), _called(info, sample.transform(in_fp64))
        ran.clear()
        with override(device):
            actual = _called(info, sample)
        served += bool(ran)
        for a, like, wanted in zip(actual, expected, exact, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (like.dtype, like.shape, like.stride())
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            torch.testing.assert_close(
                a.double(), wanted, rtol=tolerance, atol=tolerance * max(largest, 1.0), equal_nan=True
            )
    assert served >= 4

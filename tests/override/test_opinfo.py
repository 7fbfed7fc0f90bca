"""PyTorch's own samples of its norms with kernels under them: fp64's numbers, and torch's types, shapes and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..calling import each_device
from ..conformance.test_opinfo import TOLERANCE, called, in_fp64
from ..thorough import THOROUGH
from .conftest import override

NAMES = ("layer_norm", "rms_norm", "native_layer_norm")


@each_device
@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=[] if dtype is torch.float32 else [THOROUGH]) for dtype in TOLERANCE], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str, dtype: torch.dtype, device: str, op_infos: dict[str, Any], ran: list[str]) -> None:
    info, tolerance = op_infos[name], TOLERANCE[dtype]
    served = 0
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        expected, exact = called(info.op, sample), called(info.op, sample.transform(in_fp64))
        ran.clear()
        with override(device):
            actual = called(info.op, sample)
        served += bool(ran)
        for a, like, wanted in zip(actual, expected, exact, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (like.dtype, like.shape, like.stride())
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            torch.testing.assert_close(
                a.double(), wanted, rtol=tolerance, atol=tolerance * max(largest, 1.0), equal_nan=True
            )
    assert served >= 4

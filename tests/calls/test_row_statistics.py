"""Mean and rstd in one tensor, as autograd keeps them: each where kernels may read it with wide loads."""

from __future__ import annotations

import pytest
import torch

from normforge.calls.outputs import packing, unpacked


@pytest.mark.parametrize("mean", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 1001])
def test_each_starts_at_a_multiple_of_16_bytes(m: int, mean: bool) -> None:
    length, to_rstd = packing(m, mean)
    packed = torch.empty(length)
    rstd_at = packed.data_ptr() + to_rstd
    assert packed.data_ptr() % 16 == rstd_at % 16 == 0
    means, rstd = unpacked(packed, m)
    assert rstd.shape == (m,)
    assert rstd.data_ptr() == rstd_at
    if not mean:
        assert means is None
        assert to_rstd == 0
        return
    assert means is not None
    assert means.shape == (m,)
    assert means.data_ptr() == packed.data_ptr()
    assert rstd_at >= means.data_ptr() + 4 * m
    assert packed.numel() == to_rstd // 4 + m

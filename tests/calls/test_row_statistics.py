"""Mean and rstd in one tensor, as autograd keeps them: each where kernels may read it with wide loads."""

from __future__ import annotations

import pytest
import torch

from normforge.calls.outputs import pack, rstd_address, unpacked
from normforge.upstream.torch_allocator import allocator


@pytest.mark.parametrize("mean", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 1001])
def test_each_starts_at_a_multiple_of_16_bytes(m: int, mean: bool) -> None:
    packed, mean_at, rstd_at = pack(allocator(torch.device("cpu")), m, mean)
    assert packed.dtype == torch.float32
    assert packed.data_ptr() % 16 == mean_at % 16 == rstd_at % 16 == 0
    means, rstd = unpacked(packed, m)
    assert rstd.shape == (m,)
    assert rstd.data_ptr() == rstd_at
    if not mean:
        assert means is None
        assert mean_at == 0
        return
    assert means is not None
    assert means.shape == (m,)
    assert means.data_ptr() == mean_at
    assert rstd_at == rstd_address(mean_at, m) >= mean_at + 4 * m
    assert packed.numel() == (rstd_at - mean_at) // 4 + m

"""Kernels under torch's own operators where tensors are sharded: torch's rules hold, and local parts are served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from .conftest import override

NORMS = {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """This process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("norm", NORMS)
def test_sequence_parallel(norm: str, mesh: DeviceMesh, ran: list[str]) -> None:
    model = parallelize_module(torch.nn.Sequential(NORMS[norm](16)), mesh, {"0": SequenceParallel()})
    x = torch.randn(2, 4, 16)

    def called() -> list[torch.Tensor]:
        y = model(x)
        assert isinstance(y, DTensor)
        gradients = torch.autograd.grad(y.to_local().square().sum(), list(model.parameters()))
        return [y.to_local(), *[gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]]

    expected = called()
    assert not ran
    with override():
        actual = called()
    assert [name[-3:] for name in ran] == ["fwd", "bwd"]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("norm", NORMS)
def test_fully_shard(norm: str, mesh: DeviceMesh, ran: list[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), NORMS[norm](16))
    fully_shard(model, mesh=mesh)
    x = torch.randn(4, 16)

    def called() -> list[torch.Tensor]:
        model.zero_grad()
        torch.autograd.backward([model(x).square().sum()])
        gradients = [parameter.grad for parameter in model.parameters()]
        return [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]

    expected = called()
    with override():
        actual = called()
    assert [name[-3:] for name in ran] == ["fwd", "bwd"]
    assert len(actual) == len(expected) == len(list(model.parameters()))
    torch.testing.assert_close(actual, expected)

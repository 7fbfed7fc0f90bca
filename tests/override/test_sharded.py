"""Kernels under torch's own operators where tensors are sharded: torch's rules hold, and local parts are served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from .conftest import override


def in_sequence(norm: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(torch.nn.Sequential(norm), mesh, {"0": SequenceParallel()})


def fully(norm: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), norm)
    fully_shard(model, mesh=mesh)
    return model


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize("shard", [in_sequence, fully])
def test_local_parts_are_served(
    shard: Callable[..., torch.nn.Module], norm: type[torch.nn.Module], mesh: DeviceMesh, ran: list[str]
) -> None:
    model = shard(norm(16), mesh)
    x = torch.randn(2, 4, 16)

    def called() -> list[torch.Tensor]:
        model.zero_grad()
        y = model(x)
        assert isinstance(y, DTensor) == (shard is in_sequence)
        y = y.to_local() if shard is in_sequence else y
        torch.autograd.backward([y.square().sum()])
        gradients = [parameter.grad for parameter in model.parameters()]
        return [y.detach(), *[gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]]

    expected = called()
    assert not ran
    with override():
        actual = called()
    assert [name[-3:] for name in ran] == ["fwd", "bwd"]
    assert len(actual) == len(expected) == 1 + len(list(model.parameters()))
    torch.testing.assert_close(actual, expected)

"""Cases of patched models that torch's wrappers train: DDP, FSDP1 and FSDP2, each rank with rows of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import normforge

from .models import Layer, Llama, models
from .ranks import Cases
from .sharded import N

CASES = Cases()


def trained(model: torch.nn.Module, rows: slice) -> torch.Tensor:
    """Take two steps on some rows of a batch and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(2):
        x = torch.randn(dist.get_world_size(), 4, N, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x[rows]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def agree(wrap: Callable[[Llama], torch.nn.Module]) -> None:
    """Fail unless a wrapped patched model ends with the losses and parameters of a whole unpatched one."""
    model, twin = models()
    wrapped = wrap(twin)
    rank = dist.get_rank()
    losses = trained(wrapped, slice(rank, rank + 1))
    # Each rank has one row: the mean of their losses is the loss of the batch.
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), trained(model, slice(None)), rtol=1e-4, atol=1e-5)
    found = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    assert list(found) == list(model.state_dict())
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-5, msg=name)


@CASES.case
def a_patched_llama_under_ddp() -> None:
    """Gradients are averaged in buckets, as of any model."""
    agree(torch.nn.parallel.DistributedDataParallel)


@CASES.case
def a_llama_patched_within_ddp() -> None:
    """A wrapper that is there already keeps its buckets: parameters stay the objects that they are."""

    def wrap(model: Llama) -> torch.nn.Module:
        normforge.unpatch(model)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        assert len(normforge.patch(wrapped).swapped) == 5
        return wrapped

    agree(wrap)


@CASES.case
def a_patched_llama_under_fsdp1() -> None:
    """Weights are views of one flat parameter, or parameters that keep their names and are views while a layer runs."""
    # Each layer is wrapped, and the model.
    told: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({Layer}), "device_id": torch.device("cpu")}
    for keeps_parameters in (False, True):
        agree(partial(FullyShardedDataParallel, use_orig_params=keeps_parameters, **told))

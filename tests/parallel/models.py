"""Cases of whole models under several kinds of parallelism at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import normforge

from ..nn.models import LlamaRMSNorm
from .ranks import DEVICE, Cases
from .sharded import N, communicates, mesh, placed, same

CASES = Cases()


class Attention(torch.nn.Module):
    """Causal attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(N, N, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = self.o(y.transpose(1, 2).flatten(2))
        return attended


class Layer(torch.nn.Module):
    """A decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = LlamaRMSNorm(N), LlamaRMSNorm(N)
        self.attention = Attention()
        self.up, self.down = torch.nn.Linear(N, 2 * N, bias=False), torch.nn.Linear(2 * N, N, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, and think."""
        x = x + self.attention(self.norm_1(x))
        thought: torch.Tensor = self.down(torch.nn.functional.silu(self.up(self.norm_2(x))))
        return x + thought


class Llama(torch.nn.Module):
    """Two layers and a final norm, of hidden states that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(2)])
        self.norm = LlamaRMSNorm(N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.norm(x)
        return y


def tensor_parallel(model: Llama, over: DeviceMesh) -> None:
    """As torch's own recipe has it: the sequence is sharded between the linear layers."""
    parallelize_module(model, over, {"norm": SequenceParallel()})
    plan: dict[str, Any] = {
        "norm_1": SequenceParallel(),
        "norm_2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for layer in model.layers:
        parallelize_module(layer, over, plan)


def models() -> tuple[Llama, Llama]:
    """A model, and the same one patched."""
    torch.manual_seed(1)
    model, twin = Llama(), Llama()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    twin.load_state_dict(model.state_dict())
    done = normforge.patch(twin)
    assert len(done.swapped) == 5, done
    return model, twin


def agree(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Fail unless gradients of a sharded model are those of the whole one."""
    for (name, whole), part in zip(model.named_parameters(), twin.parameters(), strict=True):
        gradient: Any = part.grad
        assert gradient is not None, name
        torch.testing.assert_close(gradient.full_tensor(), whole.grad, rtol=1e-3, atol=1e-4, msg=name)


@CASES.case
def a_patched_llama_under_tensor_parallelism() -> None:
    """Its norms add no communication to what the linear layers ask for."""
    model, twin = models()
    tensor_parallel(twin, mesh())
    x = torch.randn(2, 8, N)
    model(x).square().sum().backward()
    part = placed(x, Shard(1))
    with communicates(all_gather_into_tensor=4, reduce_scatter_tensor=4):
        y = twin(part)
    same(y, model(x), Shard(1))
    y.backward(2 * y.detach())
    agree(model, twin)


@CASES.case
def a_patched_llama_under_fsdp_and_tensor_parallelism() -> None:
    """On a mesh of two dimensions, each rank of the first with rows of its own."""
    world = dist.get_world_size()
    both = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("dp", "tp"))
    model, twin = models()
    tensor_parallel(twin, both["tp"])
    for layer in twin.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(twin, mesh=both["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, twin)]
    x = torch.randn(4, 8, N)
    at = both["dp"].get_local_rank()
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        mine = DTensor.from_local(
            x[2 * at : 2 * at + 2].chunk(world // 2, 1)[both["tp"].get_local_rank()], both["tp"], [Shard(1)]
        )
        y = twin(mine)
        y.square().mean().backward()
        agree(model, twin)
        for optimizer in optimizers:
            optimizer.step()

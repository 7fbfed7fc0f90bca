"""Sequence parallelism of modules that take and return several tensors, as norms with a residual add do."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only


class SequenceParallel(ParallelStyle):
    """`torch.distributed.tensor.parallel.SequenceParallel` for modules of any number of inputs and outputs.

    torch's converts the first input and drops the others; this converts all, positional and by keyword, so that
    `AddLayerNorm` and `AddRMSNorm` can be parallelized. Of a module with one input and one output it does what torch's
    does, with one exception: parameters are replicated from rank 0 of the mesh, whatever they hold on the others.

    Inputs that are plain tensors are taken for this rank's part, which nothing checks. DTensors that are sharded
    otherwise are redistributed. Inputs that are no tensors are passed on. Each rank then normalises its part of the
    sequence, and nothing is communicated; the gradients of weight and bias are partial sums (`Partial`) on each rank,
    which optimizers and `full_tensor()` reduce.

    Args:
        sequence_dim: the dimension of inputs and outputs that is sharded, not one that is normalised.
        use_local_output: whether the module returns this rank's parts instead of DTensors.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        placements = (Shard(self.sequence_dim),)

        def convert(tensor: Any) -> Any:
            if isinstance(tensor, DTensor):
                # A negative dimension is counted from the tensor's last, and is never one of a DTensor's.
                dim = self.sequence_dim % tensor.dim()
                return tensor if tensor.placements == (Shard(dim),) else tensor.redistribute(placements=placements)
            if isinstance(tensor, torch.Tensor):
                return DTensor.from_local(tensor, device_mesh, placements, run_check=False)
            return tensor

        def before(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return tuple([convert(each) for each in inputs]), {name: convert(each) for name, each in named.items()}

        def after(module: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
            return tree_map_only(DTensor, DTensor.to_local, outputs)

        distribute_module(module, device_mesh)
        module.register_forward_pre_hook(before, with_kwargs=True)
        if self.use_local_output:
            module.register_forward_hook(after)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim}, use_local_output={self.use_local_output})"

"""Cases of norms in graphs of torch.compile, which are the same graphs in a group of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import parallelize_module

import normforge
from normforge.parallel import split_layer_norm, split_rms_norm

from ..calling import pieces
from .ranks import Cases
from .sharded import N, communicates, mesh, placed, same

CASES = Cases()


@CASES.case
def compiled_norms() -> None:
    """In one graph, with the gradients and the placements of eager calls."""
    for backend in ("aot_eager", "inductor"):
        for module in (normforge.LayerNorm(N), normforge.RMSNorm(N), normforge.AddRMSNorm(N)):
            torch._dynamo.reset()
            parallelize_module(module, mesh(), normforge.parallel.SequenceParallel())
            count = 2 if isinstance(module, normforge.AddRMSNorm) else 1
            whole = [torch.randn(2, 6, N) for _ in range(count)]
            parts = [placed(each.requires_grad_(), Shard(1)) for each in whole]
            compiled = torch.compile(module, fullgraph=True, backend=backend)
            found: Any = pieces(compiled(*parts))
            expected: Any = pieces(module(*parts))
            for one, other in zip(found, expected, strict=True):
                same(one, other.full_tensor(), Shard(1))
            leaves = [*parts, *module.parameters()]
            dys = [placed(torch.randn(2, 6, N), Shard(1)) for _ in range(count)]
            with communicates():
                gradients = torch.autograd.grad(found, leaves, dys)
            theirs: Any = torch.autograd.grad(expected, leaves, dys)
            for gradient, leaf, their in zip(gradients, leaves, theirs, strict=True):
                same(gradient, their.full_tensor(), Shard(1) if leaf.dim() > 1 else Partial())


@CASES.case
def compiled_norms_of_rows_that_are_split() -> None:
    for norm in (split_layer_norm, split_rms_norm):
        torch._dynamo.reset()
        x, weight = torch.randn(3, N, requires_grad=True), torch.randn(N, requires_grad=True)
        compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
        for given in ((x, weight), (placed(x, Shard(1)), placed(weight, Shard(0)))):
            found, expected = compiled(*given), norm(*given)
            torch.testing.assert_close(found, expected)
            one = torch.autograd.grad(found.sum(), given)
            other = torch.autograd.grad(expected.sum(), given)
            torch.testing.assert_close(one, other)

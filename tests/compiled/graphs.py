"""Graphs as Inductor's pass is given them, without the code that Inductor would write for them, and small models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import normforge
from normforge.compiled.graph_pass import fuse

ADD = "aten.add.Tensor"


class Traced:
    """A function as a graph that was rewritten. Nothing is differentiated, and what is written to stays so.

    Attributes:
        graph: what came of it.
        applied: how often each rule was applied.
    """

    def __init__(self, function: Callable[..., Any], *inputs: Any) -> None:
        self._module = make_fx(function, select_decomp_table(), "fake")(*inputs)
        self.graph = self._module.graph
        self.graph.eliminate_dead_code()
        self.applied = fuse(self.graph)
        self._module.recompile()

    def __call__(self, *inputs: Any) -> Any:
        return self._module(*inputs)

    def count(self, target: str) -> int:
        """How often an operator is in the graph."""
        return sum(target in str(node.target) for node in self.graph.nodes)


class Compiled:
    """A function whose graphs were rewritten, or not, and run node by node.

    Attributes:
        graphs: forward and backward ones, as they were made.
        applied: how often each rule was, in each.
    """

    def __init__(self, function: Callable[..., Any], *, rewrite: bool = True, **options: Any) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.applied: list[dict[str, int]] = []

        def compiler(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            self.graphs.append(module.graph)
            self.applied.append(fuse(module.graph) if rewrite else {})
            module.recompile()
            return make_boxed_func(module.forward)

        backend = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        self._call = torch.compile(function, backend=backend, **{"fullgraph": True, **options})

    def __call__(self, *inputs: Any) -> Any:
        return self._call(*inputs)

    @property
    def joined(self) -> Counter[str]:
        """How often each rule was applied in all graphs together."""
        return sum((Counter(applied) for applied in self.applied), Counter())

    def count(self, target: str, graph: int = 0) -> int:
        """How often an operator is in a graph."""
        return sum(target in str(node.target) for node in self.graphs[graph].nodes)


WIDTH = 32


class Block(torch.nn.Module):
    """A residual stream, and two branches that normalise it and add to it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(normforge.RMSNorm(width) for _ in range(2))
        self.branches = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + branch(norm(x))
        return x


class Stack(torch.nn.Sequential):
    """Two such blocks, and a norm at the end: four additions, each with a norm behind it."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), normforge.LayerNorm(WIDTH))


class PostNorm(Block):
    """A block that normalises what its branch returns too, as Gemma 2's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, behind = self.norms
        for branch in self.branches:
            x = x + behind(branch(before(x)))
        return x


def gradients(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a loss that no norm leaves constant, by x and the parameters."""
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return list(torch.autograd.grad((y * weight).float().sum(), [x, *model.parameters()]))

"""cuDNN as a peer, by a stand-in of its frontend: the signatures and the order of calls that the package asks for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.cells import Cell, Norm, Task
from benchmarks.inputs import make_inputs
from benchmarks.providers import cudnn as provider
from benchmarks.providers import every_provider

from .small import holds_to_the_oracle

PEER = "cudnn"
STREAM = 7
STEPS = ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"]


class Node:
    """A tensor of a graph: what it is declared as, or what computes it."""

    def __init__(self, dim: list[int], compute: Any = None) -> None:
        self.dim, self.compute, self.output = dim, compute, False
        self.dtype: torch.dtype | None = None

    def set_output(self, output: bool) -> Node:
        self.output = output
        return self

    def set_data_type(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Graph:
    """A graph whose norms are torch's, computed where it is executed and by the buffers that are bound to it."""

    def __init__(self, *, intermediate_data_type: str, compute_data_type: str, handle: str) -> None:
        assert (intermediate_data_type, compute_data_type, handle) == ("FLOAT", "FLOAT", "handle")
        self.done: list[str] = []
        self.given: dict[Node, tuple[list[int], torch.dtype, bool]] = {}
        self.made: list[Node] = []
        for step in STEPS:
            setattr(self, step, lambda *_, step=step: self.done.append(step))

    def tensor(self, *, dim: list[int], stride: list[int], data_type: torch.dtype, is_pass_by_value: bool) -> Node:
        assert len(dim) == len(stride) == 4
        node = Node(dim)
        self.given[node] = (stride, data_type, is_pass_by_value)
        return node

    def layernorm(self, *, bias: Node, **given: Any) -> tuple[Node | None, ...]:
        return self._forward(bias=bias, **given), None, None

    def rmsnorm(self, *, bias: Node | None = None, **given: Any) -> tuple[Node | None, ...]:
        return self._forward(bias=bias, **given), None

    def layernorm_backward(self, *, mean: Node, **given: Any) -> tuple[Node | None, ...]:
        return self._backward(mean=mean, **given)

    def rmsnorm_backward(self, *, has_dbias: bool, **given: Any) -> tuple[Node | None, ...]:
        assert not has_dbias
        return (*self._backward(mean=None, **given)[:2], None)

    def _forward(self, *, norm_forward_phase: str, input: Node, scale: Node, bias: Node | None, epsilon: Node) -> Node:
        assert norm_forward_phase == "INFERENCE"
        assert self.given[epsilon][1:] == (torch.float32, True)

        def compute(of: dict[Node, torch.Tensor]) -> torch.Tensor:
            shape, eps = of[input].shape[-1:], float(of[epsilon])
            if bias is None:
                return torch.nn.functional.rms_norm(of[input], shape, of[scale], eps)
            return torch.nn.functional.layer_norm(of[input], shape, of[scale], of[bias], eps)

        return self._make(Node(input.dim, compute))

    def _backward(
        self, *, grad: Node, input: Node, scale: Node, mean: Node | None, inv_variance: Node
    ) -> tuple[Node, ...]:
        def centred(of: dict[Node, torch.Tensor]) -> torch.Tensor:
            return (of[input].float() - (0 if mean is None else of[mean].view(-1, 1))) * of[inv_variance].view(-1, 1)

        def dx(of: dict[Node, torch.Tensor]) -> torch.Tensor:
            h, g = centred(of), of[grad].float() * of[scale]
            shift = 0 if mean is None else g.mean(-1, keepdim=True)
            return (g - h * (g * h).mean(-1, keepdim=True) - shift) * of[inv_variance].view(-1, 1)

        return (
            self._make(Node(input.dim, dx)),
            self._make(Node(scale.dim, lambda of: (of[grad].float() * centred(of)).sum(0))),
            self._make(Node(scale.dim, lambda of: of[grad].float().sum(0))),
        )

    def _make(self, node: Node) -> Node:
        self.made.append(node)
        return node

    def get_workspace_size(self) -> int:
        assert self.done == STEPS
        return 16

    def execute(self, bound: dict[Node, torch.Tensor], workspace: torch.Tensor, handle: str) -> None:
        assert (workspace.numel(), workspace.dtype, handle) == (16, torch.uint8, "handle")
        assert sys.modules["cudnn"].stream == STREAM
        for node, (stride, dtype, by_value) in self.given.items():
            tensor = bound[node]
            rows, columns = node.dim[:2]
            assert (tensor.numel(), tensor.dtype, node.dim[2:]) == (rows * columns, dtype, [1, 1])
            assert tensor.is_contiguous()
            assert stride[0] == columns
            assert by_value == (tensor.dim() == 0)
        outputs = [node for node in self.made if node.output]
        assert bound.keys() == self.given.keys() | set(outputs)
        for node in outputs:
            assert bound[node].dtype == node.dtype
            bound[node].copy_(node.compute(bound))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    cudnn: Any = ModuleType("cudnn")
    cudnn.pygraph = Graph
    cudnn.data_type = SimpleNamespace(FLOAT="FLOAT")
    cudnn.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    cudnn.norm_forward_phase = SimpleNamespace(INFERENCE="INFERENCE", TRAINING="TRAINING")
    cudnn.create_handle = lambda: "handle"
    cudnn.set_stream = lambda *, handle, stream: setattr(cudnn, "stream", stream)
    cudnn.backend_version_string = lambda: "9.20.0"
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    yield cudnn
    provider._handle.cache_clear()
    provider._plan.cache_clear()


@pytest.mark.parametrize("task", [Task.FORWARD, Task.BACKWARD], ids=lambda task: task.value)
@pytest.mark.parametrize("norm", Norm, ids=lambda norm: norm.value)
def test_its_graphs_compute_what_is_asked_of_them(package: Any, norm: Norm, task: Task) -> None:
    holds_to_the_oracle(PEER, *(Cell(task, norm, m, 96) for m in (1, 5)))


def test_copies_of_a_cells_inputs_share_a_plan_and_no_tensor(package: Any) -> None:
    cell, cpu = Cell(Task.FORWARD, Norm.LAYER, 5, 96), torch.device("cpu")
    graphs: list[Graph] = []

    def pygraph(**options: str) -> Graph:
        graphs.append(Graph(**options))
        return graphs[-1]

    package.pygraph = pygraph
    copies = [make_inputs(cell, cpu, copy) for copy in range(2)]
    builder = every_provider()[PEER].builder(cell)
    assert builder is not None
    first, second = (builder(inputs).call()["y"] for inputs in copies)
    assert len(graphs) == 1
    for y, inputs in ((first, copies[0]), (second, copies[1])):
        expected = torch.nn.functional.layer_norm(inputs.x, (96,), inputs.weight, inputs.bias, inputs.eps)
        assert torch.equal(y, expected)


def test_the_header_names_the_library_too(package: Any) -> None:
    assert every_provider()[PEER].version().endswith("(cuDNN 9.20.0)")

"""cuDNN's norms, through the graphs of its frontend, each built and planned for a cell before it is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from ..cells import Cell, Norm, Task
from ..inputs import Inputs
from ..provider import Prepared, Provider, load

_MODULE = "cudnn"

# A tensor of ours, its rows and its columns to a tensor of a graph, which it is bound to.
Declare = Callable[[torch.Tensor, int, int], Any]
# What a graph computes, given itself and that: by name, its tensors and those of ours that they are written to.
Describe = Callable[[Any, Declare], dict[str, tuple[Any, torch.Tensor]]]


@functools.cache
def _handle() -> Any:
    return load(_MODULE).create_handle()


def _prepare(inputs: Inputs, describe: Describe) -> Prepared:
    """A call of the graph that is described.

    Raises:
        cudnn.cudnnGraphNotSupportedError: cuDNN has no engine for it.
    """
    cudnn, handle = load(_MODULE), _handle()
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(intermediate_data_type=single, compute_data_type=single, handle=handle)
    bound: dict[Any, torch.Tensor] = {}

    def declare(tensor: torch.Tensor, rows: int, columns: int) -> Any:
        # Rows are a batch, columns its channels; epsilon, a scalar on the CPU, is passed by value.
        by_value = tensor.dim() == 0
        dim, stride = [rows, columns, 1, 1], [columns, 1, 1, 1]
        node = graph.tensor(dim=dim, stride=stride, data_type=tensor.dtype, is_pass_by_value=by_value)
        bound[node] = tensor
        return node

    made = describe(graph, declare)
    for node, buffer in made.values():
        node.set_output(True).set_data_type(buffer.dtype)
        bound[node] = buffer
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=inputs.x.device)
    outputs = {name: buffer for name, (_, buffer) in made.items()}

    def call() -> dict[str, torch.Tensor]:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(bound, workspace, handle=handle)
        return outputs

    return Prepared(call, lambda returned: returned)


def _forward(inputs: Inputs) -> Prepared:
    m, n = inputs.cell.m, inputs.cell.n

    def describe(graph: Any, declare: Declare) -> dict[str, tuple[Any, torch.Tensor]]:
        run = {Norm.LAYER: graph.layernorm, Norm.RMS: graph.rmsnorm}[inputs.cell.norm]
        y, *_ = run(
            # Without statistics, as the others' forward passes here.
            norm_forward_phase=load(_MODULE).norm_forward_phase.INFERENCE,
            input=declare(inputs.x, m, n),
            scale=declare(inputs.weight, 1, n),
            bias=None if inputs.bias is None else declare(inputs.bias, 1, n),
            epsilon=declare(torch.tensor(inputs.eps), 1, 1),
        )
        return {"y": (y, torch.empty_like(inputs.x))}

    return _prepare(inputs, describe)


def _backward(inputs: Inputs) -> Prepared:
    m, n = inputs.cell.m, inputs.cell.n
    dy, mean, rstd = inputs.dy, inputs.mean, inputs.rstd
    assert dy is not None
    assert rstd is not None

    def describe(graph: Any, declare: Declare) -> dict[str, tuple[Any, torch.Tensor]]:
        given = {
            "grad": declare(dy, m, n),
            "input": declare(inputs.x, m, n),
            "scale": declare(inputs.weight, 1, n),
            "inv_variance": declare(rstd, m, 1),
        }
        if mean is None:
            dx, dweight, _ = graph.rmsnorm_backward(**given, has_dbias=False)
            return {"dx": (dx, torch.empty_like(dy)), "dweight": (dweight, torch.empty_like(inputs.weight))}
        dx, *parameters = graph.layernorm_backward(**given, mean=declare(mean, m, 1))
        buffers = [(node, torch.empty_like(inputs.weight)) for node in parameters]
        return {"dx": (dx, torch.empty_like(dy)), **dict(zip(("dweight", "dbias"), buffers, strict=True))}

    return _prepare(inputs, describe)


def _library() -> str:
    return f"cuDNN {load(_MODULE).backend_version_string()}"


def _offers(cell: Cell) -> bool:
    return not cell.heads[0]


PROVIDERS = (
    Provider(
        "cudnn",
        "cuDNN",
        (_MODULE,),
        {
            (task, norm): builder
            for (task, builder), norm in product(((Task.FORWARD, _forward), (Task.BACKWARD, _backward)), Norm)
        },
        distribution="nvidia-cudnn-frontend",
        compiles=False,
        library=_library,
        offers=_offers,
    ),
)

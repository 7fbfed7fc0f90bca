"""cuDNN's norms, through the graphs of its frontend, each built and planned for a cell before it is timed."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cells import DTYPES, Cell, Norm, Task
from ..inputs import Inputs
from ..provider import Prepared, Provider, load

_MODULE = "cudnn"


@dataclass(frozen=True)
class _Operation:
    """A node of the frontend's: its name, operands by keyword, first result, and other arguments."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


_OPERATIONS = {
    (Task.FORWARD, Norm.LAYER): _Operation("layernorm", ("input", "scale", "bias", "epsilon"), ("y",)),
    (Task.FORWARD, Norm.RMS): _Operation("rmsnorm", ("input", "scale", "epsilon"), ("y",)),
    (Task.BACKWARD, Norm.LAYER): _Operation(
        "layernorm_backward", ("grad", "input", "scale", "mean", "inv_variance"), ("dx", "dweight", "dbias")
    ),
    (Task.BACKWARD, Norm.RMS): _Operation(
        "rmsnorm_backward", ("grad", "input", "scale", "inv_variance"), ("dx", "dweight"), {"has_dbias": False}
    ),
}


@dataclass(frozen=True)
class _Planned:
    """A graph that can be executed, and its tensors by the names of operands and results."""

    graph: Any
    nodes: dict[str, Any]


def _sizes(cell: Cell, name: str) -> tuple[int, int]:
    """Rows and columns of an operand or a result."""
    whole, column, row = (cell.m, cell.n), (cell.m, 1), (1, cell.n)
    return {
        "input": whole,
        "grad": whole,
        "y": whole,
        "dx": whole,
        "mean": column,
        "inv_variance": column,
        "scale": row,
        "bias": row,
        "dweight": row,
        "dbias": row,
        "epsilon": (1, 1),
    }[name]


@functools.cache
def _handle() -> Any:
    return load(_MODULE).create_handle()


# The plans of one cell, whose copies of inputs share a plan.
@functools.lru_cache(maxsize=1)
def _plan(cell: Cell) -> _Planned:
    """Plan a cell's graph.

    Raises:
        cudnn.cudnnGraphNotSupportedError: cuDNN has no engine for it.
    """
    cudnn, operation, dtype = load(_MODULE), _OPERATIONS[cell.task, cell.norm], DTYPES[cell.dtype]
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(intermediate_data_type=single, compute_data_type=single, handle=_handle())
    nodes: dict[str, Any] = {}
    for name in operation.operands:
        rows, columns = _sizes(cell, name)
        nodes[name] = graph.tensor(
            # Rows are a batch, columns its channels.
            dim=[rows, columns, 1, 1],
            stride=[columns, 1, 1, 1],
            data_type=torch.float32 if name in ("mean", "inv_variance", "epsilon") else dtype,
            is_pass_by_value=name == "epsilon",
        )
    options = dict(operation.options)
    if cell.task is Task.FORWARD:
        # Without statistics, as the others' forward passes here.
        options["norm_forward_phase"] = cudnn.norm_forward_phase.INFERENCE
    results = getattr(graph, operation.name)(**nodes, **options)
    for name, node in zip(operation.results, results, strict=False):
        node.set_output(True).set_data_type(dtype)
        nodes[name] = node
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return _Planned(graph, nodes)


def _call(inputs: Inputs) -> Prepared:
    cudnn, handle, planned = load(_MODULE), _handle(), _plan(inputs.cell)
    operation = _OPERATIONS[inputs.cell.task, inputs.cell.norm]
    given = {
        "grad": inputs.dy,
        "input": inputs.x,
        "scale": inputs.weight,
        "bias": inputs.bias,
        "mean": inputs.mean,
        "inv_variance": inputs.rstd,
        "epsilon": torch.tensor(inputs.eps),
    }
    outputs = {name: torch.empty_like(inputs.x if name in ("y", "dx") else inputs.weight) for name in operation.results}
    tensors = {name: given[name] for name in operation.operands} | outputs
    bound = {planned.nodes[name]: tensor for name, tensor in tensors.items()}
    workspace = torch.empty(planned.graph.get_workspace_size(), dtype=torch.uint8, device=inputs.x.device)

    def call() -> dict[str, torch.Tensor]:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        planned.graph.execute(bound, workspace, handle=handle)
        return outputs

    return Prepared(call, lambda returned: returned)


def _library() -> str:
    return f"cuDNN {load(_MODULE).backend_version_string()}"


def _offers(cell: Cell) -> bool:
    return not cell.heads[0]


PROVIDERS = (
    Provider(
        "cudnn",
        "cuDNN",
        (_MODULE,),
        dict.fromkeys(_OPERATIONS, _call),
        distribution="nvidia-cudnn-frontend",
        compiles=False,
        library=_library,
        offers=_offers,
    ),
)

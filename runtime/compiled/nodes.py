"""Properties of the nodes of a partitioned graph: values, views, order, writes, and what lies in memory."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, Node

from ..dtypes import HALVES
from ..upstream.torch_inductor import all_equal, without_guards

_ATEN = torch.ops.aten
RESHAPES = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default)
ADD = _ATEN.add.Tensor
CONVERT = torch.ops.prims.convert_element_type.default

# Operators of these Inductor makes code of, and fuses; all others are kernels of their own.
_FUSED = ("aten", "prims", "inductor", "quantized_decomposed")
# But for attention, products and convolutions, whose results lie in memory before anything reads them.
_KERNELS = re.compile(
    r"aten::(?:_scaled_dot_product_\w+|_(?:efficient|flash)_attention_forward"
    r"|(?:_int_|_grouped_|_scaled_|_scaled_grouped_|add|b|baddb)?mm|convolution(?:_backward)?)"
)
_OURS = "normforge"


def value(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    tensor = node.meta["val"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def is_tensor(node: object) -> TypeGuard[Node]:
    """Return True if a node's value is one tensor, and known."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def without_reshapes(node: Node, *others: Any) -> tuple[Node, list[Node]]:
    """Return the source below reshapes and the operators `others`, and the skipped nodes, last first."""
    passed = []
    while node.target in (*RESHAPES, *others) and isinstance(node.args[0], Node):
        passed.append(node)
        node = node.args[0]
    return node, passed


def origin(node: Node) -> Node:
    """Return the tensor whose memory holds a node's value."""
    while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(node.args[0], Node):
        if node.target not in RESHAPES and not any(
            result.alias_info is not None and not result.alias_info.is_write for result in node.target._schema.returns
        ):
            break
        node = node.args[0]
    return node


def has_one_user(nodes: list[Node]) -> bool:
    """Return True if each node is read once, in one place."""
    return all(sum(_reads(user, node) for user in node.users) == 1 for node in nodes)


def _reads(user: Node, node: Node) -> int:
    """Return the number of places where a node reads another."""
    return sum(each is node for each in torch.utils._pytree.tree_leaves((user.args, user.kwargs)))


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is contiguous for all values of its symbolic sizes."""
    step, strides = 1, []
    for size in reversed(tensor.shape):
        strides.append(step)
        step = step * size
    return all_equal(tensor.stride(), strides[::-1])


def is_walkable(tensor: torch.Tensor) -> bool:
    """Return True if rows have one stride for all values of the symbolic sizes."""
    size, stride = tensor.shape, tensor.stride()
    return (
        tensor.dim() > 0
        and all_equal(stride[-1:], [1])
        and all_equal(stride[:-2], [size[i + 1] * stride[i + 1] for i in range(tensor.dim() - 2)])
    )


def is_opaque(node: Node) -> bool:
    """Return True if a node's value is always in memory: Inductor fuses nothing into the kernel that computes it."""
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_opaque(node.args[0])
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in _FUSED or _KERNELS.fullmatch(node.target._schema.name) is not None
    return False


def writes(node: Node) -> bool:
    """Return True if a node writes to its arguments, or may."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        name = str(node.target)
        return "mutation" in name or "effects" in name
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written_by(node: Node) -> Iterator[Node]:
    if isinstance(node.target, torch._ops.OpOverload):
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                several = given if isinstance(given, (list, tuple)) else (given,)
                yield from [each for each in several if isinstance(each, Node)]
        yield from [each for each in node.kwargs.values() if isinstance(each, Node)]
    else:
        yield from node.all_input_nodes


class Order:
    """The order of a graph's nodes, and the written nodes. A changed graph needs a new instance."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: index for index, node in enumerate(self.nodes)}
        self.written = {origin(target) for node in self.nodes if writes(node) for target in _written_by(node)}

    def is_written(self, *nodes: Node) -> bool:
        """Return True if a tensor is written to anywhere, or copied into a written tensor."""
        return any(origin(node) in self.written or any(writes(user) for user in node.users) for node in nodes)

    def is_defined(self, nodes: list[Node], before: Node) -> bool:
        """Return True if all nodes precede another."""
        return all(self.at[node] < self.at[before] for node in nodes)

    def is_anything_written_between(self, first: Node, last: Node) -> bool:
        """Return True if a node between two nodes writes to anything."""
        return any(writes(node) for node in self.nodes[self.at[first] + 1 : self.at[last]])

    def is_light_between(self, first: Node, last: Node) -> bool:
        """Return True if nothing writes and no long kernel runs between two nodes.

        What one of them keeps alive until the other then costs no memory worth the name.
        """
        return all(_is_light(node) for node in self.nodes[self.at[first] + 1 : self.at[last]])

    def is_in_memory(self, node: Node, reader: Node) -> bool:
        """Return True if a reader finds a value in memory, whatever Inductor fuses.

        What is not opaque becomes part of the reader's own kernel, unless some kernel between the two reads it too.
        """
        node = origin(node)
        if is_opaque(node):
            return True
        ways, seen = [(reader, False)], {(reader, False)}
        while ways:
            at, passed = ways.pop()
            for source in at.all_input_nodes:
                if source is node and passed:
                    return True
                way = (source, passed or is_opaque(source))
                if self.at[source] > self.at[node] and way not in seen:
                    seen.add(way)
                    ways.append(way)
        return False


def _is_light(node: Node) -> bool:
    if writes(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == _OURS or not is_opaque(node)
    # getitem, arithmetic of sizes, and what is an input.
    return True


def reshape(graph: Graph, before: Node, node: Node, sizes: Sequence[Any], like: torch.Tensor) -> Node:
    """Insert a reshape of a tensor to the shape of `like`, with `sizes` as its arguments."""
    with graph.inserting_before(before):
        made = graph.call_function(_ATEN.reshape.default, (node, list(sizes)))
    with without_guards(like):
        made.meta["val"] = value(node).new_empty(like.shape)
    return made


def sizes_of(graph: Graph, before: Node, node: Node) -> list[Any]:
    """Return the sizes of a tensor as arguments; symbolic sizes are nodes."""
    sizes: list[Any] = []
    for dimension, size in enumerate(value(node).shape):
        if not isinstance(size, int):
            with graph.inserting_before(before):
                asked = graph.call_function(_ATEN.sym_size.int, (node, dimension))
            asked.meta["val"] = size
            sizes.append(asked)
        else:
            sizes.append(size)
    return sizes


def erase(graph: Graph, *nodes: Node) -> None:
    """Erase what nothing reads any more, and what was there for it alone."""
    for node in nodes:
        if node.op == "call_function" and not node.users and not node._erased and not writes(node):
            sources = node.all_input_nodes
            graph.erase_node(node)
            erase(graph, *sources)


def widened_from(node: Node) -> Node:
    """Return the 16-bit tensor that a node widens to fp32 for one reader, or the node itself."""
    source = node.args[0] if node.target is CONVERT else None
    if has_one_user([node]) and value(node).dtype is torch.float32 and is_tensor(source):
        return source if value(source).dtype in HALVES else node
    return node


def sum_of_two(node: Node) -> tuple[Node, Node] | None:
    """Return the two tensors that a node adds up; None if it does something else.

    They are of its shape, in memory of their own each, and not scaled (alpha): neither a number nor what is broadcast.
    """
    if node.target is not ADD or node.kwargs.get("alpha", 1) != 1 or not is_tensor(node):
        return None
    first, second = node.args
    if not is_tensor(first) or not is_tensor(second):
        return None
    same = all(
        all_equal(value(each).shape, value(node).shape) and value(each).device == value(node).device
        for each in (first, second)
    )
    return (first, second) if same and origin(first) is not origin(second) else None


def summed_over_rows(node: Node) -> Node | None:
    """Return the tensor that a node adds up over all dimensions but the last; None if it does something else."""
    if node.target is not _ATEN.sum.dim_IntList or not is_tensor(node) or not is_tensor(node.args[0]):
        return None
    given: tuple[Any, ...] = node.args
    rank = value(given[0]).dim()
    over_rows = rank > 1 and sorted(dim % rank for dim in given[1] or ()) == [*range(rank - 1)]
    return given[0] if over_rows else None


def zeros(graph: Graph, n: int, like: torch.Tensor) -> Node:
    """Return a row of zeros of another tensor's dtype, shared by all callers, at the start of the graph."""
    asked: dict[str, Any] = {"dtype": like.dtype, "layout": torch.strided, "device": like.device}
    known: list[Node] = [node for node in graph.nodes if node.meta.get("normforge_zeros") == (n, asked)]
    if known:
        return known[0]
    with graph.inserting_before(next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))):
        made = graph.call_function(_ATEN.full.default, ([n], 0), asked)
    with without_guards(like):
        made.meta |= {"val": like.new_zeros(n), "normforge_zeros": (n, asked)}
    return made

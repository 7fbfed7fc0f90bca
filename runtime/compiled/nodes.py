"""Properties of the nodes of a partitioned graph: values, views, order, writes, and what lies in memory."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from ..dtypes import HALVES
from ..upstream.torch_inductor import all_equal, without_guards

_ATEN = torch.ops.aten
RESHAPES = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default)
ADD = _ATEN.add.Tensor
SLICE = _ATEN.slice.Tensor
SUM = _ATEN.sum.dim_IntList
CONVERT = torch.ops.prims.convert_element_type.default

# Operators of these Inductor makes code of, and fuses; all others are kernels of their own.
_FUSED = ("aten", "prims", "inductor", "quantized_decomposed")
# But for attention, products and convolutions, whose results lie in memory before anything reads them.
_KERNELS = re.compile(
    r"aten::(?:_scaled_dot_product_\w+|_(?:efficient|flash)_attention_forward"
    r"|(?:_int_|_grouped_|_scaled_|_scaled_grouped_|add|b|baddb)?mm|convolution(?:_backward)?)"
)


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
    return all(
        sum(leaf is node for user in node.users for leaf in tree_leaves((user.args, user.kwargs))) == 1
        for node in nodes
    )


def is_walkable(tensor: torch.Tensor, *, contiguous: bool = False) -> bool:
    """Return True if rows have one stride for all values of the symbolic sizes, and no gaps if `contiguous`."""
    size, stride, free = tensor.shape, tensor.stride(), 1 if contiguous else 2
    nested = [size[i + 1] * stride[i + 1] for i in range(tensor.dim() - free)]
    return all_equal(stride[-1:], [1]) and all_equal(stride[:-free], nested)


def _is_kernel(node: Node) -> bool:
    """Return True if a node's operator has kernels of its own, which Inductor fuses nothing into."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in _FUSED or _KERNELS.fullmatch(node.target._schema.name) is not None
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def is_opaque(node: Node) -> bool:
    """Return True if a node's value is always in memory: Inductor fuses nothing into the kernel that computes it."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_opaque(node.args[0])
    return node.op in ("placeholder", "get_attr") or _is_kernel(node)


def writes(node: Node) -> bool:
    """Return True if a node writes to its arguments, or may."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        name = str(node.target)
        return "mutation" in name or "effects" in name
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written_by(node: Node) -> list[Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    written = [arg for argument, arg in arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return [each for each in tree_leaves((written, node.kwargs)) if isinstance(each, Node)]


def is_light(node: Node) -> bool:
    """Return True if a node writes nothing and is no long kernel.

    A tensor that is kept alive while such nodes run costs no memory worth the name.
    """
    namespace = getattr(node.target, "namespace", "")
    return not writes(node) and (namespace == "normforge" or not _is_kernel(node))


def between(first: Node, last: Node) -> Iterator[Node]:
    """Yield the nodes between two nodes."""
    node = first.next
    while node < last:
        yield node
        node = node.next


def is_written(*nodes: Node) -> bool:
    """Return True if a tensor is written to anywhere in the graph, or copied into a written tensor."""
    written = {origin(each) for node in nodes[0].graph.nodes if writes(node) for each in _written_by(node)}
    return any(origin(node) in written or any(map(writes, node.users)) for node in nodes)


def is_in_memory(node: Node, reader: Node) -> bool:
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
            if source > node and way not in seen:
                seen.add(way)
                ways.append(way)
    return False


def reshape(before: Node, node: Node, sizes: Sequence[Any], like: torch.Tensor) -> Node:
    """Insert a reshape of a tensor to the shape of `like`, with `sizes` as its arguments."""
    with before.graph.inserting_before(before):
        reshaped = before.graph.call_function(_ATEN.reshape.default, (node, list(sizes)))
    with without_guards(like):
        reshaped.meta["val"] = value(node).new_empty(like.shape)
    return reshaped


def sizes_of(before: Node, node: Node) -> list[Any]:
    """Return the sizes of a tensor as arguments; symbolic sizes are nodes."""
    sizes: list[Any] = list(value(node).shape)
    for dimension, size in enumerate(sizes):
        if not isinstance(size, int):
            with before.graph.inserting_before(before):
                sizes[dimension] = before.graph.call_function(_ATEN.sym_size.int, (node, dimension))
            sizes[dimension].meta["val"] = size
    return sizes


def erase(nodes: Iterable[Node]) -> None:
    """Erase what nothing reads any more, and what was there for it alone."""
    for node in nodes:
        if node.op == "call_function" and not node.users and not node._erased and not writes(node):
            sources = node.all_input_nodes
            node.graph.erase_node(node)
            erase(sources)


def widened_from(node: Node) -> Node:
    """Return the 16-bit tensor that a node widens to fp32 for one reader, or the node itself."""
    source = node.args[0] if node.target is CONVERT else None
    if has_one_user([node]) and value(node).dtype is torch.float32 and is_tensor(source):
        return source if value(source).dtype in HALVES else node
    return node


def addends(node: Node) -> list[tuple[Node, Node]]:
    """Return the two tensors that a node adds up unscaled, in both orders; none if it does something else."""
    if node.target is ADD and node.kwargs.get("alpha", 1) == 1 and is_tensor(node):
        first, second = node.args
        if is_tensor(first) and is_tensor(second):
            return [(first, second), (second, first)]
    return []


def row_addends(node: Node) -> list[tuple[Node, Node]]:
    """Return the `addends` of a node if each has the node's shape, and memory of its own: none is broadcast."""
    return [
        pair
        for pair in addends(node)
        if origin(pair[0]) is not origin(pair[1])
        and all(all_equal(value(each).shape, value(node).shape) for each in pair)
    ]


def zeros(graph: Graph, n: int, like: torch.Tensor) -> Node:
    """Return a row of zeros of another tensor's dtype, shared by all callers, at the start of the graph."""
    options: dict[str, Any] = {"dtype": like.dtype, "layout": torch.strided, "device": like.device}
    known: list[Node] = [node for node in graph.nodes if node.meta.get("normforge_zeros") == (n, options)]
    if known:
        return known[0]
    with graph.inserting_before(next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))):
        row = graph.call_function(_ATEN.full.default, ([n], 0), options)
    with without_guards(like):
        row.meta |= {"val": like.new_zeros(n), "normforge_zeros": (n, options)}
    return row

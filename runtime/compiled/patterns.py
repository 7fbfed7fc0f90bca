"""The table of patterns: what stands beside an operator of ours, and how the operator computes it too.

Forward, a norm adds the residual or the bias that is added before it, or the residual behind it, and casts y. An
addition joins where its operands lie in memory anyway. A tensor that Inductor computes in the addition's own kernel,
dropout's or an activation's say, would have to be written first, and read again: that moves as many bytes as is saved,
or more.
Backward, a norm reads dy in 16 bits, adds a residual's gradient to dx, and sums dx over rows.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from .. import settings
from ..calls import traced
from ..calls.check import Call, check
from ..calls.functions import FUNCTIONS
from ..calls.outputs import packing, results_of
from ..codegen.parameters import QUANTISED, RENORMED
from ..codegen.values import Direction
from ..dtypes import FLOATS, HALVES, rounded_to
from ..errors import NormforgeError
from ..selection import dispatch
from ..upstream.torch_inductor import all_equal, without_guards

# Questions about nodes of a partitioned graph: values, views, order, writes, and what lies in memory.

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


def inserted(before: Node, operation: Any, args: tuple[Any, ...], result: Any, **options: Any) -> Node:
    """Insert a call of an operator in front of a node, given the call's result."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(operation, args, options)
    node.meta["val"] = result
    return node


def reshape(before: Node, node: Node, sizes: Sequence[Any], like: torch.Tensor) -> Node:
    """Insert a reshape of a tensor to the shape of `like`, with `sizes` as its arguments."""
    with without_guards(like):
        reshaped = value(node).new_empty(like.shape)
    return inserted(before, _ATEN.reshape.default, (node, list(sizes)), reshaped)


def sizes_of(before: Node, node: Node) -> list[Any]:
    """Return the sizes of a tensor as arguments; symbolic sizes are nodes."""
    sizes: list[Any] = list(value(node).shape)
    for dimension, size in enumerate(sizes):
        if not isinstance(size, int):
            sizes[dimension] = inserted(before, _ATEN.sym_size.int, (node, dimension), size)
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
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with without_guards(like):
        row = inserted(first, _ATEN.full.default, ([n], 0), like.new_zeros(n), **options)
    row.meta["normforge_zeros"] = n, options
    return row


# Operators of ours: their arguments and results by name, and how to change both.


class Operator(NamedTuple):
    """A node that is an operator of ours.

    Attributes:
        node: the node.
        function: the name of the function.
        args: the arguments by name; nodes where they are tensors.
        call: the call, of fake tensors.
        results: the nodes of the results by name; a result that nothing reads is missing.
    """

    node: Node
    function: str
    args: Mapping[str, Any]
    call: Call
    results: dict[str, Node]


def read(node: object) -> Operator | None:
    """Return the operator of a node; None for other nodes and for unknown uses of the results."""
    if not isinstance(node, Node) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    function = node.target._schema.name.removeprefix("normforge::")
    if function not in FUNCTIONS or node.target is not traced.operator(function):
        return None
    args = {**dict(zip(FUNCTIONS[function].passed, node.args, strict=False)), **node.kwargs}
    call = _checked(function, args)
    if call is None:
        return None
    names = [row.name for row in call.function.family.results if row.name in call.wants]
    results: dict[str, Node] = {}
    for user in node.users:
        index = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int) or not 0 <= index < len(names) or names[index] in results:
            return None
        results[names[index]] = user
    return Operator(node, function, args, call, results)


def checked(old: Operator, args: Mapping[str, Any]) -> Call | None:
    """Return the call of an operator with other arguments, or None.

    The result is None if the operator lacks one of the arguments, or if the call is illegal, rounds in other places
    than the operator does, or is served by no kernel of a process that may make none.
    """
    call = _checked(old.function, args) if args.keys() <= old.args.keys() else None
    if call is None or _rounds_first_to(call) != _rounds_first_to(old.call) or not _is_served(call):
        return None
    return call


def change(old: Operator, args: Mapping[str, Any], call: Call, before: Node, view: Node | None) -> dict[str, Node]:
    """Give an operator other arguments, and return the nodes of its results by name, new ones among them.

    Args:
        old: the operator.
        args: all arguments by name.
        call: the call of these arguments.
        before: the node that the operator is moved in front of; its own node to stay.
        view: the reshape of the rows that the operator normalised, if the arguments no longer have the new shape.
    """
    node = old.node
    with without_guards(call.x):
        fakes = results_of(call, call.x.new_empty)
    names = [row.name for row in call.function.family.results]
    returned = {name: fake for name, fake in zip(names, fakes, strict=True) if fake is not None}
    node.target = traced.operator(call.function.family.functions[call.function.norm])
    # Graphs leave out trailing arguments that are None.
    node.args, node.kwargs = tuple([args.get(name) for name in call.function.passed]), {}
    # Inductor keeps the strides of the fake arguments.
    eager = torch.fx.map_arg(node.args, lambda each: each.meta["val"])
    node.meta |= {"val": list(returned.values()), "eager_input_vals": (eager, {})}
    before.prepend(node)
    results = {}
    for index, (name, fake) in reversed([*enumerate(returned.items())]):
        result = old.results.get(name)
        if result is None:
            result = node.graph.call_function(operator.getitem, (node, index))
            result.meta = dict(node.meta)
        elif view is not None:
            rows: Any = view.args[1]
            reshaped = reshape(view, result, rows if name == "y" else rows[:-1], value(result))
            result.replace_all_uses_with(reshaped)
            reshaped.update_arg(0, result)
        result.args = (node, index)
        result.meta["val"] = fake
        node.append(result)
        results[name] = result
    return results


def servable() -> tuple[Any, ...]:
    """Return the loaded kernels if no others may be made: rewriting depends on these as well as on the graph."""
    if settings.generates() and not settings.frozen():
        return ()
    return tuple(sorted((entry.mode, entry.first, entry.last or 0) for entry in dispatch.loaded()))


def _checked(function: str, args: Mapping[str, Any]) -> Call | None:
    if any(isinstance(each, Node) and "val" not in each.meta for each in args.values()):
        return None
    values = {name: each.meta["val"] if isinstance(each, Node) else each for name, each in args.items()}
    try:
        with without_guards(values["x"]):
            return check(function, values, addressed=False)
    except (NormforgeError, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode):
        return None


def _rounds_first_to(call: Call) -> torch.dtype | None:
    """Return the dtype that rows are rounded to before the weight multiplies them."""
    dy = call.args.get("dy")
    return rounded_to(call.mode.cast, call.dtype_of("y") or (call.x if dy is None else dy).dtype, call.x.dtype)


def _is_served(call: Call) -> bool:
    """Return True if a kernel exists, or may be made and compiled when the graph runs."""
    if settings.generates() and not settings.frozen():
        return True
    return isinstance(call.n, int) and dispatch.loaded().find(call.mode.name, call.n) is not None


# Matches

_log = logging.getLogger(__name__)


class Match(NamedTuple):
    """One way in which an operator can compute what nodes beside it compute; legal if the operator takes the arguments.

    Attributes:
        norm: the operator.
        args: the arguments that change, by name.
        before: the node that the operator moves in front of.
        replaced: nodes that go, each with what replaces it: one of its operands, the name of a result, or a function
            that returns a view of a result, given all results.
        view: the reshape of the rows that the operator reads no longer, or None.
    """

    norm: Operator
    args: Mapping[str, Any]
    before: Node
    replaced: Sequence[tuple[Node, Any]] = ()
    view: Node | None = None


def _casts(norm: Operator) -> Iterator[Match]:
    """Match the casts of an fp32 y to the same 16 bits by all of its readers: y is rounded once either way."""
    y = norm.results.get("y")
    if y is None or value(y).dtype is not torch.float32 or norm.call.mode.fquant.quantises:
        return
    passed, casts = [y], []
    for each in passed:
        for user in each.users:
            if user.target in RESHAPES:
                passed.append(user)
            elif user.target is CONVERT:
                casts.append(user)
            else:
                return
    dtypes = {cast.args[1] for cast in casts}
    if len(dtypes) == 1 and dtypes <= set(HALVES):
        yield Match(norm, {"out_dtype": dtypes.pop()}, norm.node, [(cast, cast.args[0]) for cast in casts])


def _sum(norm: Operator) -> Iterator[Match]:
    """Match the addition of a residual or a bias before a norm, which returns the sum if others read the sum."""
    total, chain = without_reshapes(norm.args["x"])
    # Rows that were cut in pieces, or put together, are others.
    if total.target is not ADD or not all_equal(value(total).shape[-1:], norm.call.x.shape[-1:]):
        return
    dtype, mode = value(total).dtype, norm.call.mode
    is_near = is_walkable(value(total), contiguous=True) and all(map(is_light, between(total, norm.node)))
    # A reshape of the results would lose the groups of scales.
    if dtype not in FLOATS or mode.x_bias or (chain and mode.serves) or not is_near:
        return
    stores = not has_one_user([total, *chain])
    # Modulated norms, without the word, and quantised ones always return the sum.
    is_returned = stores or norm.call.function.family is QUANTISED
    words = {"fadd": "pre_add_store" if is_returned else "pre_add"} if "fadd" in norm.args else {}
    options = [] if stores else [*_biased(total)]
    for each, other in [] if mode.fadd.adds else row_addends(total):
        x, residual = widened_from(each), other if stores else widened_from(other)
        # The sum is returned in the residual's dtype.
        if not stores or value(other).dtype is dtype:
            options += [{**option, "residual": residual, **words} for option in (*_biased(x), {"x": x})]
    for args in options:
        rows = [args[name] for name in ("x", "residual") if name in args]
        walkable = all(is_walkable(value(each)) and is_in_memory(each, total) for each in rows)
        if walkable and not is_written(*rows, total):
            args["out_dtype"] = norm.args["out_dtype"] or norm.call.dtype_of("y")
            yield Match(norm, args, min(total.users), [(total, "residual_out")] * stores, chain[0] if chain else None)


def _biased(node: Node) -> Iterator[dict[str, Any]]:
    """Yield the operand of a bias, and the bias, if nothing else reads their sum."""
    for x, bias in addends(node) if has_one_user([node]) else []:
        of_one_shape = all_equal(value(x).shape, value(node).shape) and value(x).dtype in FLOATS
        if of_one_shape and all_equal(value(bias).shape, value(node).shape[-1:]) and value(x).dim() > 1:
            yield {"x": x, "x_bias": bias}


def _narrow_dy(norm: Operator) -> Iterator[Match]:
    """Match the widening of dy from 16 bits, which is exact."""
    dy = norm.args["dy"]
    if dy is None:
        return
    narrow = widened_from(dy)
    if narrow is not dy and is_walkable(value(narrow)) and all(map(is_light, between(dy, norm.node))):
        yield Match(norm, {"dy": narrow}, norm.node)


def _addition(result: str, total: Node) -> Iterator[Match]:
    """Match the addition of a residual to y, or of another gradient to dx; `result` is the name of y or dx.

    The operator rounds the sum alone. Of two sums beside a norm, the sum behind the norm is joined. The norm then moves
    three tensors: x, the residual and the sum. Joined with the sum before, the norm moves three or four, and the sum
    behind two or three. A norm behind the sum reads one tensor in place of two, so no order moves less.
    """
    pairs = [(widened_from(each), widened_from(other)) for each, other in row_addends(total)]
    rows = [(norm, each, other) for each, other in pairs if (norm := _that_computes(result, each)) is not None]
    # The later of two that could: what it adds is the result of the earlier one.
    for last, each, other in sorted(rows, key=lambda row: row[0].node, reverse=True):
        first = _first_of(last)
        if first is None or is_written(last.results[result], other, total):
            continue
        dtype, x = value(total).dtype, first.args["x"]
        dtypes = {value(other).dtype, first.call.dtype_of(result), last.call.dtype_of(result)}
        # A chain of operators must round each intermediate dx to the dtype of the sum.
        if not {dtype, *dtypes} <= set(FLOATS) or (first.node is not last.node and dtypes != {dtype}):
            continue
        of_one_shape = all_equal(value(other).shape, value(x).shape)
        waits = other > first.node
        # A reshape or a widening of the result reads the result before the sum does.
        readers = [user for node in first.results.values() for user in node.users]
        may_wait = first.node is last.node and min(readers) >= total and all(map(is_light, between(first.node, total)))
        if (
            not is_walkable(value(other), contiguous=not of_one_shape)
            or (waits and not may_wait)
            or any(map(writes, between(first.node, total)))
            or (result == "y" and not is_in_memory(other, total))
        ):
            continue
        if not of_one_shape:
            other = reshape(first.node, other, sizes_of(first.node, x), value(x))
        args = {"residual": other, "fadd": "post_add", "out_dtype": dtype}
        if result == "dx":
            args = {"dresidual_out": other, "dx_dtype": dtype}
        yield Match(first, args, total if waits else first.node, [(total, each)])


def _that_computes(result: str, node: Node) -> Operator | None:
    """Return the operator whose result, y or dx, a node is, possibly reshaped, if the result is read once."""
    node, chain = without_reshapes(node)
    return _of(result, node) if has_one_user([node, *chain]) else None


# With these operands, another result would change with the sum, or the operator has added a residual already.
_IN_THE_WAY = {"y": ("residual",), "dx": ("x_bias", "dropout_rng", "gate")}


def _of(result: str, node: Node) -> Operator | None:
    """Return the operator whose result a node is, if no operand is in the way of a sum."""
    norm = read(node.args[0]) if node.target is operator.getitem else None
    if norm is None or norm.results.get(result) is not node:
        return None
    return None if any(norm.args.get(name) is not None for name in _IN_THE_WAY[result]) else norm


def _first_of(last: Operator) -> Operator | None:
    """Return the first of a chain of operators that each add the previous dx, if the first adds nothing."""
    first: Operator | None = last
    while first is not None and first.args.get("dresidual_out") is not None:
        first = _that_computes("dx", first.args["dresidual_out"])
    return first


# The options that both norms of one kernel share.
_SHARED = ("eps", "weight_offset", "cast")


def _next_norm(second: Operator) -> Iterator[Match]:
    """Match the norm of a sum that the operator of another norm computes: one operator computes all three."""
    total, _ = without_reshapes(second.args["x"])
    first = read(total.args[0]) if total.target is operator.getitem else None
    if first is None or first.function != second.function or first.results.get("y") is not total:
        return
    residual, dtype, (mode, m) = first.args["residual"], value(total).dtype, (second.call.mode, second.call.m)
    if (
        first.args["fadd"] != "post_add"
        or not all_equal(value(total).shape, second.call.x.shape)
        or any(first.args.get(name) != second.args.get(name) for name in _SHARED)
        or {first.call.x.dtype, value(residual).dtype} != {dtype}
        or any((mode.fadd.adds, mode.x_bias, mode.serves, first.call.mode.x_bias, is_written(total)))
        # The places of both norms' statistics are numbers.
        or not isinstance(m, int)
        or not all(map(is_light, between(first.node, second.node)))
    ):
        return
    args = {name: first.args[name] for name in ("x", "weight", "bias", "residual", *_SHARED) if name in first.args}
    args |= {f"next_{name}": second.args[name] for name in ("weight", "bias") if name in second.args}
    args |= {name: second.args[name] for name in ("smooth_scale", "fquant")}
    args["out_dtype"] = second.args["out_dtype"] or second.call.dtype_of("y")
    args["save_mv"] = first.args["save_mv"] or second.args["save_mv"]
    statistics = [
        (results.pop(name), partial(_statistic, m, second.call.function.norm.centres, at, name))
        for at, results in enumerate((first.results, second.results))
        for name in ("mean", "rstd")
        if name in results
    ]
    both = second._replace(function=RENORMED.functions[second.call.function.norm], args=args)
    yield Match(both, {}, first.node, [(total, "residual_out"), *statistics])


def _statistic(m: int, centres: bool, at: int, name: str, results: Mapping[str, Node]) -> Node:
    """Return the statistics of one of two norms, a view of those of both."""
    packed = results["rstd"]
    length, to_rstd = packing(m, centres)
    start = at * (value(packed).numel() - length) + (to_rstd // value(packed).itemsize if name == "rstd" else 0)
    return inserted(packed.next, SLICE, (packed, 0, start, start + m), value(packed)[start : start + m])


def _column_sum(node: Node) -> Iterator[Match]:
    """Match the sum of dx over rows: the gradient of the bias of a linear layer before the norm.

    An operator returns such a sum for a bias of x. A bias of zeros changes nothing else, and dx is not read again.
    """
    args: tuple[Any, ...] = node.args
    rank = value(args[0]).dim() if is_tensor(node) and is_tensor(args[0]) else 0
    if rank < 2 or sorted(dim % rank for dim in args[1] or ()) != [*range(rank - 1)]:
        return
    dx, passed = without_reshapes(args[0], CONVERT)
    norm = _of("dx", dx)
    if norm is None or not isinstance(norm.call.n, int) or not all_equal(value(args[0]).shape[-1:], [norm.call.n]):
        return
    if not is_written(dx) and {value(each).dtype for each in (node, *passed)} <= set(FLOATS):
        bias = zeros(node.graph, norm.call.n, value(node))
        wants = [*norm.args["wants"], "dx_bias"]
        yield Match(norm, {"x_bias": bias, "wants": wants}, norm.node, [(node, "dx_bias")])


class Pattern(NamedTuple):
    """A row of the table.

    Attributes:
        name: the name, in the log and in tests.
        anchor: the direction of the operators of ours, or the operator of torch, at which the search starts.
        matches: from the operator of ours, or the node of torch's, to the ways to join, best first.
    """

    name: str
    anchor: Any
    matches: Callable[[Any], Iterator[Match]]

    def at(self, node: Node) -> Iterator[Match]:
        """Yield the matches at a node."""
        norm = read(node) if isinstance(self.anchor, Direction) else None
        if norm is not None and norm.call.function.direction is self.anchor:
            yield from self.matches(norm)
        elif node.target is self.anchor:
            yield from self.matches(node)


# In the order in which graphs are searched for them.
PATTERNS = (
    Pattern("join_cast", Direction.FORWARD, _casts),
    Pattern("join_post_add", ADD, partial(_addition, "y")),
    Pattern("join_next_norm", Direction.FORWARD, _next_norm),
    Pattern("join_sum", Direction.FORWARD, _sum),
    Pattern("join_widening", Direction.BACKWARD, _narrow_dy),
    Pattern("join_gradient", ADD, partial(_addition, "dx")),
    Pattern("join_column_sum", SUM, _column_sum),
)


def fuse(graph: Graph) -> dict[str, int]:
    """Join what can be joined, and return how often each pattern was found."""
    applied = {pattern.name: 0 for pattern in PATTERNS}
    for pattern in PATTERNS:
        for node in list(graph.nodes):
            # A match may have erased this node already.
            if not node._erased:
                applied[pattern.name] += any(map(_is_applied, pattern.at(node)))
    if any(applied.values()):
        graph.lint()
        _log.debug("joined with norms: %s", applied)
    return applied


def _is_applied(match: Match) -> bool:
    """Rewrite the graph by a match and return True, if the operator takes the arguments and they exist in time."""
    args = {**match.norm.args, **match.args}
    call = checked(match.norm, args)
    if call is None or not all(each < match.before for each in _nodes(args)):
        erase(_nodes(match.args))
        return False
    results = change(match.norm, args, call, match.before, match.view)
    for node, replacement in match.replaced:
        if not isinstance(replacement, Node):
            replacement = replacement(results) if callable(replacement) else results[replacement]
            if value(replacement).dim() != value(node).dim():
                replacement = reshape(node, replacement, list(value(node).shape), value(node))
        for each in without_reshapes(replacement)[1]:
            each.meta["val"] = value(each).to(value(node).dtype)
        node.replace_all_uses_with(replacement)
    erase([*[node for node, _ in match.replaced], *_nodes(match.norm.args), *results.values()])
    return True


def _nodes(args: Mapping[str, Any]) -> list[Node]:
    return [each for each in args.values() if isinstance(each, Node)]

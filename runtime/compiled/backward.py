"""Join a gradient's kernel with the nodes beside it: a residual's gradient, the sum of dx over rows, dy in 16 bits."""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from ..dtypes import FLOATS
from ..upstream.torch_inductor import all_equal
from .nodes import (
    CONVERT,
    Order,
    erase,
    has_one_user,
    is_contiguous,
    is_walkable,
    reshape,
    sizes_of,
    sum_of_two,
    summed_over_rows,
    value,
    widened_from,
    without_reshapes,
    zeros,
)
from .operators import Operator, change, checked, insert, read


def join_widening(graph: Graph, node: Node) -> bool:
    """Have a backward operator read the 16 bits that its dy was made of, which is exact."""
    norm = read(node)
    if norm is None or not norm.is_backward or norm.given["dy"] is None:
        return False
    dy = norm.given["dy"]
    narrow = widened_from(dy)
    if narrow is dy or not is_walkable(value(narrow)):
        return False
    given = {**norm.given, "dy": narrow}
    call = checked(norm, given)
    if call is None or not Order(graph).is_light_between(dy, node):
        return False
    change(norm, given, call)
    erase(graph, dy)
    return True


def join_gradient(graph: Graph, node: Node) -> bool:
    """Have a backward operator add to dx what is added to it."""
    pair = sum_of_two(node)
    if pair is None or value(node).dtype not in FLOATS:
        return False
    rows = [(norm, dx, other) for dx, other in (pair, pair[::-1]) if (norm := _that_computes(dx)) is not None]
    if not rows:
        return False
    order = Order(graph)
    # The later of two that could: what it adds is the earlier one's dx.
    for last, dx, other in sorted(rows, key=lambda row: -order.at[row[0].node]):
        first = _first_of(last)
        written = order.is_written(last.results["dx"], other, node)
        if first is not None and not written and _adds(graph, order, first, last, other, node):
            for each in without_reshapes(dx)[1]:
                each.meta["val"] = value(each).to(value(node).dtype)
            node.replace_all_uses_with(dx)
            erase(graph, node)
            return True
    return False


def join_column_sum(graph: Graph, node: Node) -> bool:
    """Have a backward operator add up dx over rows: the gradient of the bias of a linear layer before the norm.

    It is what the operator returns for a bias of x. One of zeros changes nothing else, and dx is not read again.
    """
    rows = summed_over_rows(node)
    if rows is None:
        return False
    dx, between = without_reshapes(rows, CONVERT)
    norm = _of_dx(dx)
    if norm is None or not isinstance(norm.call.n, int) or not all_equal(value(rows).shape[-1:], [norm.call.n]):
        return False
    if Order(graph).is_written(dx) or not {value(each).dtype for each in (node, *between)} <= set(FLOATS):
        return False
    bias = zeros(graph, norm.call.n, value(node))
    given = {**norm.given, "x_bias": bias, "wants": [*norm.given["wants"], "dx_bias"]}
    call = checked(norm, given)
    if call is None:
        erase(graph, bias)
        return False
    made = insert(graph, norm, given, call, norm.node)
    for name, result in norm.results.items():
        result.replace_all_uses_with(made[name])
    node.replace_all_uses_with(reshape(graph, node, made["dx_bias"], list(value(node).shape), value(node)))
    erase(graph, node, *norm.results.values())
    return True


def _that_computes(node: Node) -> Operator | None:
    """Return the backward operator whose dx, possibly reshaped, a node is, if dx is read once."""
    dx, chain = without_reshapes(node)
    return _of_dx(dx) if has_one_user([dx, *chain]) else None


def _of_dx(node: Node) -> Operator | None:
    """Return the backward operator whose dx a node is, if no other result is computed from dx."""
    norm = read(node.args[0]) if node.target is operator.getitem else None
    if norm is None or not norm.is_backward or norm.results.get("dx") is not node:
        return None
    # dx_bias would be the sum of what is added to dx, too, and ddropped and dgated would have it.
    return None if any(getattr(norm.call.mode, axis) for axis in ("x_bias", "dropout", "x_gate")) else norm


def _first_of(last: Operator) -> Operator | None:
    """Return the first of a chain of operators that each add the previous dx, if the first adds nothing."""
    first = last
    while first.given.get("dresidual_out") is not None:
        before = _that_computes(first.given["dresidual_out"])
        if before is None:
            return None
        first = before
    return first


def _adds(graph: Graph, order: Order, first: Operator, last: Operator, other: Node, total: Node) -> bool:
    """Have the first of a row of operators add another gradient, so that the last returns the sum of all."""
    dtype, x = value(total).dtype, first.given["x"]
    dtypes = {value(other).dtype, first.call.dtype_of("dx"), last.call.dtype_of("dx")}
    # A chain of operators must round each intermediate dx to the dtype of the sum.
    if value(other).dtype not in FLOATS or (first.node is not last.node and dtypes != {dtype}):
        return False
    of_one_shape = all_equal(value(other).shape, value(x).shape)
    if not (is_walkable(value(other)) if of_one_shape else is_contiguous(value(other))):
        return False
    waits = order.at[other] > order.at[first.node]
    if waits and not (first.node is last.node and of_one_shape and _may_wait(order, first, total)):
        return False
    if order.is_anything_written_between(first.node, total):
        return False
    given = {**first.given, "dresidual_out": other, "dx_dtype": dtype}
    call = checked(first, given if of_one_shape else {**given, "dresidual_out": x})
    if call is None:
        return False
    if waits:
        for each in (first.node, *first.results.values()):
            total.prepend(each)
    if not of_one_shape:
        sizes = sizes_of(graph, first.node, x)
        given["dresidual_out"] = reshape(graph, first.node, other, sizes, value(x))
    change(first, given, call)
    return True


def _may_wait(order: Order, norm: Operator, total: Node) -> bool:
    """Return True if an operator may run at the addition of its dx rather than at its own position."""
    read_at = [order.at[user] for result in norm.results.values() for user in result.users]
    return order.is_light_between(norm.node, total) and min(read_at) >= order.at[total]

"""Join the nodes before and after a norm with the norm: a residual's addition, a bias, and a cast of y.

An addition joins where both operands lie in memory anyway. A tensor that Inductor computes in the addition's own
kernel, dropout's or an activation's say, would have to be written first, and read again: that moves as many bytes as is
saved, or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..calls.check import Call
from ..dtypes import FLOATS, HALVES
from ..upstream.torch_inductor import all_equal
from .nodes import (
    ADD,
    CONVERT,
    RESHAPES,
    Order,
    erase,
    has_one_user,
    is_contiguous,
    is_tensor,
    is_walkable,
    reshape,
    sum_of_two,
    value,
    widened_from,
    without_reshapes,
)
from .operators import Operator, change, checked, insert, read


class _Joined(NamedTuple):
    """An addition that can join a norm: what the norm is given then, the call that it makes, and where it may stand."""

    given: dict[str, Any]
    call: Call
    before: Node


def join_cast(graph: Graph, node: Node) -> bool:
    """Have a norm return y in the 16 bits that all readers of an fp32 y cast it to: it is rounded once either way."""
    norm = read(node)
    if norm is None or norm.is_backward or norm.call.mode.fquant.quantises:
        return False
    y = norm.results.get("y")
    if y is None or value(y).dtype is not torch.float32:
        return False
    passed, casts = [y], []
    for each in passed:
        for user in each.users:
            if user.target in RESHAPES:
                passed.append(user)
            elif user.target is CONVERT:
                casts.append(user)
            else:
                return False
    dtypes = {cast.args[1] for cast in casts}
    if len(dtypes) != 1 or not dtypes <= set(HALVES):
        return False
    given = {**norm.given, "out_dtype": dtypes.pop()}
    call = checked(norm, given)
    if call is None:
        return False
    change(norm, given, call)
    for each in passed[1:]:
        each.meta["val"] = value(each).to(given["out_dtype"])
    for cast in casts:
        narrow = cast.args[0]
        assert isinstance(narrow, Node)
        cast.replace_all_uses_with(narrow)
        graph.erase_node(cast)
    return True


def join_sum(graph: Graph, node: Node) -> bool:
    """Have a norm add the residual that is added before it, or the bias, and return the sum if others read it."""
    norm = read(node)
    if norm is None or norm.is_backward or norm.call.mode.x_bias or norm.call.mode.fadd.adds:
        return False
    total, chain = without_reshapes(norm.given["x"])
    # Rows that were cut in pieces, or put together, are others.
    if total.target is not ADD or not all_equal(value(total).shape[-1:], norm.call.x.shape[-1:]):
        return False
    order = Order(graph)
    joined = next(_ways(order, norm, total, chain), None)
    if joined is None:
        return False
    results = insert(graph, norm, joined.given, joined.call, joined.before)
    for name, old in norm.results.items():
        made = results[name]
        if chain:
            # The norm was of rows in another shape than they were added in.
            rows: Any = chain[0].args[1]
            made = reshape(graph, node, made, rows if name == "y" else rows[:-1], value(old))
        old.replace_all_uses_with(made)
        graph.erase_node(old)
    erase(graph, node)
    if "residual_out" in results:
        total.replace_all_uses_with(results["residual_out"])
    erase(graph, total)
    return True


def _ways(order: Order, norm: Operator, total: Node, chain: list[Node]) -> Iterator[_Joined]:
    """Yield the ways in which an addition can join the norm of its sum."""
    first_user = min(total.users, key=order.at.__getitem__)
    is_read_besides = not has_one_user([total, *chain])
    dtype = value(total).dtype
    if dtype not in FLOATS or not is_contiguous(value(total)) or not order.is_light_between(total, norm.node):
        return
    pair = sum_of_two(total)
    options: list[dict[str, Any]] = []
    for one, other in [] if pair is None else [pair, pair[::-1]]:
        # The sum is returned in the residual's dtype.
        residual = other if is_read_besides else widened_from(other)
        if not is_read_besides or value(residual).dtype is dtype:
            fadd = "pre_add_store" if is_read_besides else "pre_add"
            x, bias = _without_bias(widened_from(one))
            if bias is not None:
                options.append({"x": x, "x_bias": bias, "residual": residual, "fadd": fadd})
            options.append({"x": widened_from(one), "residual": residual, "fadd": fadd})
    x, bias = _without_bias(total)
    if bias is not None and not is_read_besides:
        options.append({"x": x, "x_bias": bias})
    for option in options:
        # A family without the word always returns the sum.
        given = {**norm.given, **{name: each for name, each in option.items() if name != "fadd" or name in norm.given}}
        read_from = [each for each in given.values() if isinstance(each, Node)]
        rows = [option[name] for name in ("x", "residual") if name in option]
        if (
            all(is_walkable(value(each)) and order.is_in_memory(each, total) for each in rows)
            and order.is_defined(read_from, first_user)
            and not order.is_written(*rows, total)
        ):
            if given["out_dtype"] is None and value(option["x"]).dtype is not norm.call.dtype_of("y"):
                given["out_dtype"] = norm.call.dtype_of("y")
            call = checked(norm, given)
            if call is not None:
                yield _Joined(given, call, first_user)


def _without_bias(node: Node) -> tuple[Node, Node | None]:
    """Return the operand of a bias, and the bias, if nothing else reads their sum."""
    if node.target is ADD and has_one_user([node]) and node.kwargs.get("alpha", 1) == 1:
        for x, bias in (node.args, node.args[::-1]):
            if not is_tensor(x) or not is_tensor(bias):
                continue
            of_one_shape = all_equal(value(x).shape, value(node).shape) and value(x).dtype in FLOATS
            if of_one_shape and all_equal(value(bias).shape, value(node).shape[-1:]) and value(x).dim() > 1:
                return x, bias
    return node, None

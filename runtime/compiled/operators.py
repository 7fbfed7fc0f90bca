"""The nodes of a graph that are operators of ours: their arguments and results by name, and how to change both."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .. import settings
from ..calls import traced
from ..calls.check import Call, check
from ..calls.functions import FUNCTIONS
from ..calls.outputs import results_of
from ..dtypes import rounded_to
from ..errors import NormforgeError
from ..selection import dispatch
from ..upstream.torch_inductor import without_guards


def value(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node."""
    tensor = node.meta["val"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def reshape(before: Node, node: Node, sizes: Sequence[Any], like: torch.Tensor) -> Node:
    """Insert a reshape of a tensor to the shape of `like`, with `sizes` as its arguments."""
    with before.graph.inserting_before(before):
        reshaped = before.graph.call_function(torch.ops.aten.reshape.default, (node, list(sizes)))
    with without_guards(like):
        reshaped.meta["val"] = value(node).new_empty(like.shape)
    return reshaped


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
    node.args, node.kwargs = tuple([args[name] for name in call.function.passed]), {}
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

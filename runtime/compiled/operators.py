"""The nodes of a graph that are operators of ours: what they were given and return, by name, and how to change that."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import settings
from ..calls import traced
from ..calls.check import Call, check
from ..calls.functions import FUNCTIONS
from ..calls.outputs import results_of
from ..dtypes import rounded_to
from ..errors import NormforgeError
from ..selection import dispatch
from ..upstream.torch_inductor import without_guards


@dataclass(frozen=True)
class Operator:
    """A node that is an operator of ours.

    Attributes:
        node: it.
        function: the function that it is.
        given: its arguments by name; nodes where they are tensors.
        call: the call that it makes, of fake tensors.
        results: the nodes of what it returns, by name; those that nothing reads are missing.
    """

    node: Node
    function: str
    given: Mapping[str, Any]
    call: Call
    results: Mapping[str, Node]

    @property
    def is_backward(self) -> bool:
        """Return True if the operator computes gradients."""
        return self.call.mode.is_backward


def read(node: object) -> Operator | None:
    """Return the operator of a node; None for other nodes and for unknown uses of the results."""
    if not isinstance(node, Node) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    function = node.target._schema.name.removeprefix("normforge::")
    if function not in FUNCTIONS or node.target is not traced.operator(function):
        return None
    given = {**dict(zip(FUNCTIONS[function].passed, node.args, strict=False)), **node.kwargs}
    call = _checked(function, given)
    if call is None:
        return None
    names = [row.name for row in call.function.family.results if row.name in call.wants]
    results: dict[str, Node] = {}
    for user in node.users:
        index = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int) or not 0 <= index < len(names) or names[index] in results:
            return None
        results[names[index]] = user
    return Operator(node, function, given, call, results)


def checked(old: Operator, given: Mapping[str, Any]) -> Call | None:
    """Return the call of an operator on other arguments, or None.

    It is None where the operator lacks one of the arguments, or where that call is illegal, would round in other places
    than the operator does, or is served by no kernel of a process that may make none.
    """
    call = _checked(old.function, given) if given.keys() <= old.given.keys() else None
    if call is None or _rounds_first_to(call) != _rounds_first_to(old.call) or not _is_served(call):
        return None
    return call


def change(old: Operator, given: Mapping[str, Any], call: Call) -> None:
    """Give an operator other arguments, of which it returns the same results, in other types perhaps."""
    old.node.args, old.node.kwargs = _arguments(old.function, given), {}
    made = _results(call)
    _describe(old.node, made)
    for name, result in old.results.items():
        result.meta["val"] = made[name]


def insert(graph: Graph, old: Operator, given: Mapping[str, Any], call: Call, before: Node) -> dict[str, Node]:
    """Put an operator like another, of other arguments, before a node, and return the nodes of its results, by name."""
    made = _results(call)
    results = {}
    with graph.inserting_before(before):
        node = graph.call_function(traced.operator(old.function), _arguments(old.function, given))
        node.meta = dict(old.node.meta)
        _describe(node, made)
        for index, (name, fake) in enumerate(made.items()):
            results[name] = graph.call_function(operator.getitem, (node, index))
            results[name].meta = {**old.node.meta, "val": fake}
    return results


def _describe(node: Node, made: Mapping[str, torch.Tensor]) -> None:
    """Set the fake results of an operator, and the fake arguments, whose strides Inductor keeps."""
    given = torch.fx.map_arg(node.args, lambda each: each.meta["val"])
    node.meta |= {"val": list(made.values()), "eager_input_vals": (given, {})}


def _arguments(function: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([given[name] for name in FUNCTIONS[function].passed])


def _results(call: Call) -> dict[str, torch.Tensor]:
    """Return the fake results of an operator by name."""
    with without_guards(call.x):
        made = results_of(call, call.x.new_empty)
    named = zip([row.name for row in call.function.family.results], made, strict=True)
    return {name: tensor for name, tensor in named if tensor is not None}


def servable() -> tuple[Any, ...]:
    """Return the loaded kernels if no others may be made: rewriting depends on these as well as on the graph."""
    if settings.generates() and not settings.frozen():
        return ()
    return tuple(sorted((entry.mode, entry.first, entry.last or 0) for entry in dispatch.loaded()))


def _checked(function: str, given: Mapping[str, Any]) -> Call | None:
    if any(isinstance(each, Node) and "val" not in each.meta for each in given.values()):
        return None
    values = {name: each.meta["val"] if isinstance(each, Node) else each for name, each in given.items()}
    try:
        with without_guards(values["x"]):
            return check(function, values, addressed=False)
    except (NormforgeError, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode):
        return None


def _rounds_first_to(call: Call) -> torch.dtype | None:
    """Return the dtype that rows are rounded to before the weight multiplies them."""
    dy = call.given.get("dy")
    return rounded_to(call.mode.cast, call.dtype_of("y") or (call.x if dy is None else dy).dtype, call.x.dtype)


def _is_served(call: Call) -> bool:
    """Return True if a kernel exists, or may be made and compiled when the graph runs."""
    if settings.generates() and not settings.frozen():
        return True
    return isinstance(call.n, int) and dispatch.loaded().find(call.mode.name, call.n) is not None

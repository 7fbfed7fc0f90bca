"""Find in the text of a forward where a norm's result is scaled and shifted.

It is written in one of two ways: `self.norm(x) * (1 + scale) + shift`, or `modulate(self.norm(x), shift, scale)` by
whatever function. The norm's result may have a name first, if the very next statement gives that name to what it makes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

# From which a scope of its own begins, with other variables.
SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp),
)

# What makes up expressions that may be evaluated before the norm is called instead of after: it calls views alone.
_QUIET = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.Constant, ast.BinOp, ast.UnaryOp),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
_VIEWS = frozenset(("unsqueeze", "squeeze", "view", "reshape", "chunk"))


@dataclass(frozen=True)
class Modulation:
    """A modulation of a norm's result in a forward.

    Attributes:
        norm: the name of the norm in its module.
        function: the function that modulates, with dots; None where it is written out.
        positional: the number of further positional arguments; 2 where scale and shift are written out.
        named: the names of the keyword arguments.
    """

    norm: str
    function: str | None
    positional: int
    named: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """The place of a modulation in a forward's tree.

    Attributes:
        modulation: the modulation.
        node: the expression that modulates.
        call: the call of the norm.
        function: the function, None where it is written out.
        given: the expressions of the further positional arguments.
        named: the keyword arguments.
        spent: the additions that are part of the modulation.
        before: the statement that only gives the norm's result its name.
    """

    modulation: Modulation
    node: ast.expr
    call: ast.Call
    function: ast.expr | None
    given: tuple[ast.expr, ...]
    named: tuple[ast.keyword, ...] = ()
    spent: tuple[ast.BinOp, ...] = ()
    before: ast.stmt | None = None


def nodes_of(definition: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function in the order of its text, without the contents of inner scopes."""
    waiting: list[ast.AST] = list(reversed(definition.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, SCOPES):
            waiting += reversed(list(ast.iter_child_nodes(node)))


def places_of(definition: ast.FunctionDef) -> list[Place]:
    """Return the places in a method where a norm's result is modulated."""
    first = definition.args.args[0].arg
    found: list[Place] = []
    for node in (definition, *nodes_of(definition)):
        if isinstance(node, ast.expr):
            found += _matched(node, lambda rows: call_of_norm(rows, first))
        # The statements of an inner scope are not this function's.
        if node is definition or not isinstance(node, SCOPES):
            for _, statements in ast.iter_fields(node):
                found += _named_first(statements, first) if isinstance(statements, list) else ()
    return found


def _named_first(statements: Iterable[ast.AST], first: str) -> Iterator[Place]:
    """Yield the places where a statement names the norm's result and the next statement modulates the name."""
    for before, after in pairwise(statements):
        name = _assigned(before)
        if name is None or name != _assigned(after):
            continue
        assert isinstance(before, ast.Assign)
        assert isinstance(after, ast.Assign)
        call = call_of_norm(before.value, first)
        loads = [node for node in ast.walk(after.value) if isinstance(node, ast.Name) and node.id == name]
        if call is None or len(loads) != 1:
            continue
        calls: dict[ast.expr, ast.Call] = {loads[0]: call}
        for place in _matched(after.value, calls.get):
            yield replace(place, before=before)


def _assigned(statement: ast.AST) -> str | None:
    """Return the only name that a statement assigns, or None."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def call_of_norm(node: ast.expr, first: str) -> ast.Call | None:
    """Return a node that is `self.norm(x)`, with one argument, or else None."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner)), args=[argument], keywords=[]):
            return node if owner == first and not isinstance(argument, ast.Starred) else None
    return None


def norm_of(call: ast.Call) -> str:
    """Return the name of the norm that a `call_of_norm` calls."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr


def _matched(node: ast.expr, source: Callable[[ast.expr], ast.Call | None]) -> Iterator[Place]:
    """Yield the modulation that an expression is, if any.

    Args:
        node: the expression.
        source: maps an expression to the call of a norm whose result the expression is, or to None.
    """
    if isinstance(node, ast.Call) and node.args:
        call, function, given = source(node.args[0]), _dotted(node.func), node.args[1:]
        named = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
        beside = [*given, *(keyword.value for keyword in node.keywords if keyword.arg is not None)]
        two = len(beside) == 2 == len(given) + len(node.keywords)
        if call is not None and function and two and all(map(_is_quiet, beside)):
            what = Modulation(norm_of(call), function, len(given), named)
            yield Place(what, node, call, node.func, tuple(given), tuple(node.keywords))
    for product, shift in _terms(node, ast.Add):
        for rows, factor in _terms(product, ast.Mult):
            call, less = source(rows), _less_one(factor)
            if call is not None and less is not None and _is_quiet(less[0]) and _is_quiet(shift):
                scale, addition = less
                assert isinstance(node, ast.BinOp)
                what = Modulation(norm_of(call), None, 2, ())
                yield Place(what, node, call, None, (scale, shift), spent=(node, addition))
                return


def _terms(node: ast.expr, operator: type[ast.operator]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield both terms of an operation, in either order."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        yield node.left, node.right
        yield node.right, node.left


def _less_one(factor: ast.expr) -> tuple[ast.expr, ast.BinOp] | None:
    """Return the scale of a factor 1 + scale, and the addition; `(1 + scale)[:, None]` gives `scale[:, None]`."""
    for one, scale in _terms(factor, ast.Add):
        if isinstance(one, ast.Constant) and type(one.value) in (int, float) and one.value == 1:
            assert isinstance(factor, ast.BinOp)
            return scale, factor
    match factor:
        case ast.Subscript(value=inner, slice=at) if within := _less_one(inner):
            return ast.Subscript(within[0], at, ast.Load()), within[1]
        case ast.Call(func=ast.Attribute(value=inner, attr="unsqueeze" as name)) if within := _less_one(inner):
            return ast.Call(ast.Attribute(within[0], name, ast.Load()), factor.args, factor.keywords), within[1]
    return None


def _dotted(node: ast.expr) -> str | None:
    """Return an expression's dotted name, or None if the expression is more than a name."""
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _is_quiet(node: ast.expr) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    views = all(isinstance(call.func, ast.Attribute) and call.func.attr in _VIEWS for call in calls)
    return views and all(isinstance(each, (*_QUIET, ast.Call)) for each in ast.walk(node))

"""Rewrite the text of a class's forward so that it adds, normalises and modulates by functions of normforge.

Only `a + b`, calls of norms and modulations of a norm's result are replaced. The rest of the forward stays, with its
decorators, defaults and closure. The text is used only if compiling it gives the code that the class runs.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache, reduce, update_wrapper
from operator import or_
from typing import Any

from .function_state import content_of
from .report import LeftAloneError
from .text import SCOPES, Modulation, Sum, call_of_norm, modulations_of, sums_of

# The attribute of its module that a rewritten forward calls first, and the variable that it keeps the result in: a
# `sums.Sums`, by whose methods the forward adds and calls norms.
SUMS = "_normforge_sums"

# The attribute that a rewritten forward calls to modulate a norm's result. Its arguments: the function, or None for a
# written-out expression; the norm; the norm's input; the function's other arguments.
MODULATE = "_normforge_modulate"


@dataclass(frozen=True)
class Forward:
    """The forward of a class, read.

    Attributes:
        function: the function itself, without decorators.
        sums: its additions, in the order of the text.
        modulations: its modulations of the results of norms.
    """

    function: types.FunctionType
    sums: tuple[Sum, ...]
    modulations: tuple[Modulation, ...]

    def sums_with(self, norms: Collection[str], modulated: Iterable[int]) -> list[Sum]:
        """Return the sums that are computed together with norms, and are part of no modulation that is replaced."""
        spent = {addition for which in modulated for addition in self.modulations[which].spent}
        return [
            each for each in self.sums if each.node not in spent and not {each.behind, *each.inputs}.isdisjoint(norms)
        ]


@cache
def read(cls: Any) -> Forward:
    """Read the forward of a class.

    Raises:
        LeftAloneError: its text is missing, or differs from the code that runs.
    """
    forward, _, _ = _read(cls)
    return forward


def _read(cls: Any) -> tuple[Forward, ast.Module, ast.FunctionDef]:
    """Return the forward of a class, the tree of its file, and its definition in the tree."""
    function = inspect.unwrap(cls.forward)
    if not isinstance(function, types.FunctionType):
        raise LeftAloneError("its forward is no function of Python's")
    try:
        # The whole file is parsed: how a method is called depends on whether its module was imported there.
        tree = ast.parse("".join(inspect.findsource(function)[0]))
        definition = _definition_in(tree, function)
    except (OSError, TypeError, SyntaxError) as error:
        raise LeftAloneError(f"the text of its forward cannot be read ({type(error).__name__}: {error})") from None
    if _compiled(tree, function) != function.__code__:
        raise LeftAloneError("the text of its forward is not what it runs")
    first = definition.args.args[0].arg if definition.args.args else None
    names = [node for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id == first]
    if first is None or any(not isinstance(name.ctx, ast.Load) for name in names):
        raise LeftAloneError("its forward has no first parameter that stays what it is")
    return Forward(function, sums_of(definition), modulations_of(definition)), tree, definition


def rewritten(cls: Any, norms: Collection[str], modulated: Iterable[int]) -> Callable[..., Any]:
    """Return a class's forward, decorated as before, with some of its operations replaced by calls of ours.

    Args:
        cls: the class.
        norms: the names of the norms whose calls are replaced, with the sums that they are called with.
        modulated: the modulations to replace.

    Raises:
        LeftAloneError: the forward cannot be read, or a decorator holds the function in an unknown way.
    """
    # Read anew, because nodes are replaced in the tree.
    forward, tree, definition = _read(cls)
    modulations = [forward.modulations[which] for which in modulated]
    _Replacing(definition, forward.sums_with(norms, modulated), modulations, norms)
    old = forward.function
    return _decorated(cls.forward, old, _like(_compiled(tree, old), old, old.__closure__))


class _Replacing(ast.NodeTransformer):
    """Puts calls in the place of additions, norms and modulations, in the body of a function."""

    def __init__(
        self, definition: ast.FunctionDef, sums: list[Sum], modulations: list[Modulation], norms: Collection[str]
    ) -> None:
        self._first = definition.args.args[0].arg
        self._sums = {each.node: each.behind for each in sums}
        called = {name for each in sums for name in (each.behind, *each.inputs)}
        self._norms = called.intersection(norms)
        self._branches = {branch for each in sums for branch in each.branches}
        self._modulations = {each.node: each for each in modulations}
        self._dropped = {each.before for each in modulations}
        definition.body = [node for node in map(self.visit, definition.body) if node is not None]
        if sums:
            begins = _called(self._first, SUMS, [ast.Name(self._first, ast.Load())])
            definition.body.insert(0, ast.Assign([ast.Name(SUMS, ast.Store())], begins))

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, SCOPES):
            return node
        if node in self._dropped:
            return None
        if node in self._modulations:
            return ast.copy_location(self._modulated(self._modulations[node]), node)
        self.generic_visit(node)
        if isinstance(node, ast.If) and node in self._branches:
            node.body.insert(0, ast.Expr(_called(SUMS, "forget", [])))
        elif isinstance(node, ast.BinOp) and node in self._sums:
            behind = self._sums[node]
            norm = ast.Constant(behind if behind in self._norms else None)
            return ast.copy_location(_called(SUMS, "add", [norm, node.left, node.right]), node)
        elif (call := call_of_norm(node, self._first)) is not None and call.func.attr in self._norms:
            return ast.copy_location(_called(SUMS, "normalise", [call.func, *call.args]), node)
        return node

    def _modulated(self, modulation: Modulation) -> ast.Call:
        function = modulation.function or ast.Constant(None)
        rows, *args = map(self.visit, (*modulation.call.args, *modulation.args))
        keywords = [ast.keyword(each.arg, self.visit(each.value)) for each in modulation.keywords]
        return _called(self._first, MODULATE, [function, modulation.call.func, rows, *args], keywords)


def _called(owner: str, name: str, args: list[ast.expr], keywords: Iterable[ast.keyword] = ()) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(owner, ast.Load()), name, ast.Load()), args, list(keywords))


def _definition_in(tree: ast.Module, function: types.FunctionType) -> ast.FunctionDef:
    """Return the definition of a function in the tree of its file."""
    named = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == function.__name__]
    # A function's code begins with its decorators.
    lines = [min([each.lineno, *(decorator.lineno for decorator in each.decorator_list)]) for each in named]
    if lines.count(function.__code__.co_firstlineno) != 1:
        raise LeftAloneError("the text of its forward is not where it was")
    return named[lines.index(function.__code__.co_firstlineno)]


def _compiled(tree: ast.Module, function: types.FunctionType) -> types.CodeType:
    """Compile the tree of a file, and return the code of a function in it."""
    old = function.__code__
    # A file states its `__future__` imports itself; an interpreter's line may have them from an earlier line.
    flags = old.co_flags & _FUTURE
    whole: types.CodeType = compile(ast.fix_missing_locations(tree), old.co_filename, "exec", flags, dont_inherit=True)
    waiting = [whole]
    while waiting:
        code = waiting.pop()
        if (code.co_name, code.co_firstlineno) == (old.co_name, old.co_firstlineno):
            return code
        waiting += [held for held in code.co_consts if isinstance(held, types.CodeType)]
    raise LeftAloneError("the text of its forward is not where it was")


_FUTURE = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))


def _decorated(outer: Any, old: types.FunctionType, new: types.FunctionType) -> Callable[..., Any]:
    """Return a copy of a decorated function that wraps `new` in place of `old`: same code, another closure."""
    if outer is old:
        return new
    inner = getattr(outer, "__wrapped__", None)
    cells = (getattr(outer, "__closure__", None) or ()) if isinstance(outer, types.FunctionType) else ()
    if [content_of(cell) is inner for cell in cells].count(True) != 1:
        raise LeftAloneError(f"its forward is decorated by {getattr(outer, '__qualname__', outer)}, which is not known")
    within, itself = _decorated(inner, old, new), types.CellType()
    replaced = {id(inner): types.CellType(within), id(outer): itself}
    closure = tuple(replaced.get(id(content_of(cell)), cell) for cell in cells)
    itself.cell_contents = decorated = _like(outer.__code__, outer, closure)
    decorated.__dict__["__wrapped__"] = within
    return decorated


def _like(
    code: types.CodeType, old: types.FunctionType, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """Return a function that is another one with other code, or another closure."""
    new = types.FunctionType(code, old.__globals__, old.__name__, old.__defaults__, closure)
    new.__kwdefaults__ = old.__kwdefaults__
    update_wrapper(new, old)
    del new.__dict__["__wrapped__"]
    return new

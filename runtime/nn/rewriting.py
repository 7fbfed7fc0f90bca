"""A forward that adds and modulates by methods of ours, made from the text of a class's own.

Only `a + b` and what modulates a norm's result is replaced; all else of the forward is what it was, with its
decorators, defaults and closure. The text is taken only if compiling it gives what the class runs.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any

from ..codegen.lazy import cached_property
from .modulation_text import Modulation, Place, nodes_of, places_of

# What a rewritten forward calls of its module in the place of `+`: with the index of the addition, and what is added.
ADD = "_normforge_add"

# What it calls where a norm's result is modulated: with the function, None where it is written out, the norm, what that
# is given, and the function's other arguments.
MODULATE = "_normforge_modulate"


class UnreadableError(Exception):
    """A forward that cannot be rewritten; the text says why."""


@dataclass(frozen=True)
class Forward:
    """The forward of a class, read.

    Attributes:
        function: the function itself, without decorators.
        text: the file that it is in.
        additions: how many `a + b` are in it, in the order of the text.
        modulations: what it does with the results of norms.
        spent: of each modulation, which additions are part of it.
    """

    function: types.FunctionType
    text: str
    additions: int
    modulations: tuple[Modulation, ...]
    spent: tuple[frozenset[int], ...]

    @cached_property
    def adding(self) -> types.FunctionType:
        """The function, with every addition made by the module's method ADD."""
        return self.changed(range(self.additions), ())

    def changed(self, added: Iterable[int], modulated: Iterable[int]) -> types.FunctionType:
        """The function, with some of what it does made by methods of its module's.

        Args:
            added: which additions ADD makes, which is given an index into these.
            modulated: which modulations MODULATE makes.
        """
        tree, definition = _parsed(self.text, self.function)
        nodes, places = _additions(definition), places_of(definition)
        sums = {id(nodes[which]): index for index, which in enumerate(added)}
        replacing = _Replacing(definition.args.args[0].arg, sums, [places[which] for which in modulated])
        definition.body = [made for made in map(replacing.visit, definition.body) if made is not None]
        old = self.function
        code = _compiled(tree, old)
        made = types.FunctionType(code, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
        return _like(made, old)


@cache
def read(cls: Any) -> Forward:
    """Read the forward of a class.

    Raises:
        UnreadableError: its text is not there, or is not what it runs.
    """
    function = inspect.unwrap(cls.forward)
    if not isinstance(function, types.FunctionType):
        raise UnreadableError("its forward is no function of Python's")
    try:
        # Of the whole file: how a method is called depends on whether its module was imported there.
        text = "".join(inspect.findsource(function)[0])
        tree, definition = _parsed(text, function)
    except (OSError, TypeError, SyntaxError) as error:
        raise UnreadableError(f"the text of its forward cannot be read ({type(error).__name__}: {error})") from None
    if _shape(_compiled(tree, function)) != _shape(function.__code__):
        raise UnreadableError("the text of its forward is not what it runs")
    first = definition.args.args[0].arg if definition.args.args else None
    if first is None or any(isinstance(node, ast.Name) and _assigns(node, first) for node in ast.walk(definition)):
        raise UnreadableError("its forward has no first parameter that stays what it is")
    additions, places = _additions(definition), places_of(definition)
    spent = (frozenset(additions.index(node) for node in place.spent) for place in places)
    return Forward(function, text, len(additions), tuple(place.modulation for place in places), tuple(spent))


def rewritten(cls: Any, added: Iterable[int], modulated: Iterable[int]) -> Callable[..., Any]:
    """A class's forward changed as `Forward.changed` says, decorated as it was.

    Raises:
        UnreadableError: it cannot be read, or a decorator keeps the function in a way that is not known.
    """
    forward = read(cls)
    made: Callable[..., Any] = _decorated(cls.forward, forward.function, forward.changed(added, modulated))
    return made


class _Replacing(ast.NodeTransformer):
    """Puts calls in the place of additions and modulations."""

    def __init__(self, first: str, sums: Mapping[int, int], places: Iterable[Place]) -> None:
        self._first = first
        self._sums = sums
        self._places = {id(place.node): place for place in places}
        self._dropped = {id(place.before) for place in self._places.values() if place.before is not None}

    def visit(self, node: ast.AST) -> Any:
        if id(node) in self._dropped:
            return None
        place, index = self._places.get(id(node)), self._sums.get(id(node))
        if place is not None:
            return ast.copy_location(self._modulated(place), node)
        self.generic_visit(node)
        if index is None:
            return node
        assert isinstance(node, ast.BinOp)
        return ast.copy_location(self._called(ADD, [ast.Constant(index), node.left, node.right]), node)

    def _modulated(self, place: Place) -> ast.Call:
        function = place.function or ast.Constant(None)
        rows, *given = map(self.visit, (*place.call.args, *place.given))
        named = [ast.keyword(keyword.arg, self.visit(keyword.value)) for keyword in place.named]
        return self._called(MODULATE, [function, place.call.func, rows, *given], named)

    def _called(self, name: str, given: list[ast.expr], named: Iterable[ast.keyword] = ()) -> ast.Call:
        return ast.Call(ast.Attribute(ast.Name(self._first, ast.Load()), name, ast.Load()), given, list(named))


def _parsed(text: str, function: types.FunctionType) -> tuple[ast.Module, ast.FunctionDef]:
    """The tree of a file, and in it the definition of a function."""
    tree, at = ast.parse(text), (function.__name__, function.__code__.co_firstlineno)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and (node.name, _line(node)) == at]
    if len(found) != 1:
        raise UnreadableError("the text of its forward is not where it was")
    return tree, found[0]


def _line(definition: ast.FunctionDef) -> int:
    """Where the code of a function begins: with its decorators."""
    return min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])


def _assigns(node: ast.Name, name: str) -> bool:
    return node.id == name and not isinstance(node.ctx, ast.Load)


def _additions(definition: ast.FunctionDef) -> list[ast.BinOp]:
    """The additions in a function, but for those in scopes within it."""
    return [node for node in nodes_of(definition) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]


def _compiled(tree: ast.Module, function: types.FunctionType) -> types.CodeType:
    """The code of a function in the tree of its file."""
    old = function.__code__
    # A file says so itself; what was typed into an interpreter may have it from before.
    flags = old.co_flags & _FUTURE
    whole: types.CodeType = compile(ast.fix_missing_locations(tree), old.co_filename, "exec", flags, dont_inherit=True)
    waiting = [whole]
    while waiting:
        code = waiting.pop()
        if (code.co_name, code.co_firstlineno) == (old.co_name, old.co_firstlineno):
            return code
        waiting += [held for held in code.co_consts if isinstance(held, types.CodeType)]
    raise UnreadableError("the text of its forward is not where it was")


_FUTURE = reduce(or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))


def _shape(code: types.CodeType) -> tuple[Any, ...]:
    """What two codes that run alike have in common: all but where they come from."""
    constants = tuple(
        _shape(held) if isinstance(held, types.CodeType) else (type(held), repr(held)) for held in code.co_consts
    )
    return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants)


def _decorated(outer: Any, old: types.FunctionType, new: types.FunctionType) -> Any:
    """A function that wraps another, wrapping a third as well as it does: with the same code and another closure."""
    if outer is old:
        return new
    inner = getattr(outer, "__wrapped__", None)
    cells = (getattr(outer, "__closure__", None) or ()) if isinstance(outer, types.FunctionType) else ()
    if [_content(cell) is inner for cell in cells].count(True) != 1:
        raise UnreadableError(
            f"its forward is decorated by {getattr(outer, '__qualname__', outer)}, which is not known"
        )
    within, itself = _decorated(inner, old, new), types.CellType()
    replaced = {id(inner): types.CellType(within), id(outer): itself}
    closure = tuple(replaced.get(id(_content(cell)), cell) for cell in cells)
    made = types.FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure)
    itself.cell_contents = _like(made, outer)
    made.__dict__["__wrapped__"] = within
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Nothing is in it yet.
        return None


def _like(made: types.FunctionType, old: types.FunctionType) -> types.FunctionType:
    made.__kwdefaults__ = old.__kwdefaults__
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(made, name, getattr(old, name))
    made.__dict__.update(old.__dict__)
    return made

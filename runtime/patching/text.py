"""Read the text of a class's forward, and rewrite it to add, normalise, modulate and rotate by functions of normforge.

Reading finds the forward's sums, the norms called with them, and where a norm's result is scaled and shifted, or added.
The text is followed in the order in which it runs. The norm *directly behind* a sum is called before any other code can
run: only assignments of names, and look-ups of names and attributes, are between the two.

A modulation is written in one of two ways: `self.norm(x) * (1 + scale) + shift`, or `modulate(self.norm(x), shift,
scale)` with any function. The norm's result may first be assigned to a name, if the very next statement assigns the
modulated rows to the same name. A sum `residual + self.norm(x)` is found by the same rules.

A rotation is `q, k = rotate(q, k, cos, sin)`, with any function, if q and k are results of norms, transposed at most,
or viewed as heads and then transposed. The rotation of one tensor reads as a modulation does.

Rewriting replaces only `a + b`, calls of norms, and modulations and rotations of a norm's result. The rest of the
forward stays, with its decorators, defaults and closure. The text is used only if compiling it gives the code that the
class runs.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial, update_wrapper
from itertools import pairwise
from operator import attrgetter
from typing import Any

from .function_state import content_of
from .probing import attempt
from .report import LeftAloneError

# Attributes of its module that a rewritten forward calls first, and the variables that it keeps the results in: a
# `sums.Sums`, by whose methods it adds and calls norms, and a `rotating.Rotary`, by whose methods it normalises and
# rotates q and k.
SUMS, ROTARY = "_normforge_sums", "_normforge_rotary"

# The attribute that a rewritten forward calls to modulate a norm's result. Its arguments: the function, or None for a
# written-out expression; the norm; the norm's input; the function's other arguments.
MODULATE = "_normforge_modulate"

# Nodes that begin a scope of their own.
_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
    *(ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp),
)


def _call_of_norm(node: Any, first: str) -> Any:
    """Return a node that is `self.norm(x)`, with one argument, or else None; `.func.attr` is the norm's name."""
    match node:
        case ast.Call(ast.Attribute(ast.Name(owner)), [argument], []):
            return node if owner == first and not isinstance(argument, ast.Starred) else None
    return None


# Sums


@dataclass(eq=False)
class Sum:
    """An addition `a + b` in a forward.

    Attributes:
        node: the addition.
        behind: the name of the norm that is called directly behind it.
        inputs: the names of the norms called before it with one of its operands.
        addend: the call of the norm whose result is one of its operands, and is read nowhere else.
        branches: the branches between it and the norm. The norm is directly behind the sum only if the forward takes
            none of them.
    """

    node: ast.BinOp
    behind: str | None = None
    inputs: set[str] = field(default_factory=set)
    addend: Any = None
    branches: list[ast.If] = field(default_factory=list)

    @property
    def added(self) -> str | None:
        """The name of the norm of `addend`."""
        return None if self.addend is None else self.addend.func.attr

    @property
    def norms(self) -> set[str | None]:
        """The names of all norms that it may be computed together with."""
        return {self.behind, self.added, *self.inputs}


# Nodes that run no code that could change a tensor, once their parts have run. Attribute look-ups are assumed harmless.
_IDLE = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Assign, ast.Expr, ast.Return, ast.BoolOp, ast.IfExp),
    *(ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
# Statements that run once, from their beginning to their end.
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.If)


class _Run:
    """A run through the text of a forward, which notes its sums, and of each sum the norms it meets."""

    def __init__(self, definition: ast.FunctionDef, first: str) -> None:
        self._first = first
        self.sums: dict[ast.AST, Sum] = {}
        # The value of each variable: an expression's node, or an object for a value from elsewhere.
        self._values: dict[str, object] = {}
        # The norms that were called, each with its input.
        self._calls: list[tuple[str, object]] = []
        # The sum that ran last, while nothing else ran since, and the branches since.
        self._last: Sum | None = None
        self._passed: list[ast.If] = []
        self._visit_all(definition.body)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self._visit(node)

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, _SCOPES) or (isinstance(node, ast.stmt) and not isinstance(node, _SIMPLE)):
            self._last = None
        if isinstance(node, ast.If):
            self._visit_branches(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            self._visit(node.value)
            value = self._value(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._visit_all(targets)
            self._values |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        elif not isinstance(node, _SCOPES):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                self.sums[node] = Sum(node)
            self._visit_all(ast.iter_child_nodes(node))
            self._run(node)

    def _run(self, node: ast.AST) -> None:
        """Note a node whose parts ran."""
        last, stored = self._last, isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if isinstance(node, ast.Name) and stored:
            self._values[node.id] = node
        elif isinstance(node, ast.BinOp) and node in self.sums:
            operands = [self._value(node.left), self._value(node.right)]
            self._last, self._passed = self.sums[node], []
            self._last.inputs = {norm for norm, value in self._calls if any(value is each for each in operands)}
        elif not _is_idle(node) or (isinstance(node, ast.Attribute) and stored):
            self._last = None
        if (call := _call_of_norm(node, self._first)) is not None:
            norm, value = call.func.attr, self._value(call.args[0])
            self._calls.append((norm, value))
            if last is not None and value is last.node:
                last.behind, last.branches = norm, self._passed

    def _visit_branches(self, node: ast.If) -> None:
        self._visit(node.test)
        last, passed, before = self._last, self._passed, dict(self._values)
        for branch in (node.body, node.orelse):
            self._last = None
            self._visit_all(branch)
        if node.orelse:
            self._last = None
            self._values = {name: value for name, value in self._values.items() if before.get(name) is value}
        else:
            # Go on as if the branch were not taken; the rewritten branch calls `forget` when it runs.
            self._last, self._passed, self._values = last, [*passed, node], before

    def _value(self, node: ast.expr) -> object:
        return self._values.setdefault(node.id, object()) if isinstance(node, ast.Name) else node


def _is_idle(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops)
    return isinstance(node, _IDLE) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


# Modulations

# Nodes of expressions that may be evaluated before the norm's call instead of after; the only calls are views.
_QUIET = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.Constant, ast.BinOp, ast.UnaryOp),
    *(ast.expr_context, ast.operator, ast.unaryop),
)
_VIEWS = frozenset(("unsqueeze", "squeeze", "view", "reshape", "chunk"))


@dataclass(frozen=True, eq=False)
class Modulation:
    """A modulation of a norm's result in a forward.

    Attributes:
        node: the expression that modulates.
        call: the call of the norm.
        function: the function that modulates, a name with dots; None where it is written out.
        args: the further positional arguments; scale and shift where they are written out.
        keywords: the keyword arguments.
        spent: the additions that are part of the modulation.
        before: the statement that only gives the norm's result its name.
    """

    node: ast.expr
    call: Any
    function: ast.expr | None
    args: list[ast.expr]
    keywords: list[ast.keyword] = field(default_factory=list)
    spent: tuple[ast.expr, ...] = ()
    before: ast.stmt | None = None

    @property
    def norm(self) -> str:
        """The name of the norm in its module."""
        name: str = self.call.func.attr
        return name


def _modulations_in(node: ast.AST, first: str) -> Iterator[Modulation]:
    """Yield the modulations within a node, without those of inner scopes."""
    for _, statements in ast.iter_fields(node):
        yield from _named_first(statements, first) if isinstance(statements, list) else ()
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.expr):
            yield from _matched(inner, lambda rows: _call_of_norm(rows, first))
        if not isinstance(inner, _SCOPES):
            yield from _modulations_in(inner, first)


def _named_first(statements: Iterable[Any], first: str) -> Iterator[Modulation]:
    """Yield the places where a statement names the norm's result and the next statement modulates the name."""
    for before, after in pairwise(statements):
        match before, after:
            case (ast.Assign([ast.Name(name)], rows), ast.Assign([ast.Name(again)], value)) if name == again:
                call = _call_of_norm(rows, first)
                loads = [node for node in ast.walk(value) if isinstance(node, ast.Name) and node.id == name]
                if call is not None and len(loads) == 1:
                    calls: dict[ast.expr, Any] = {loads[0]: call}
                    yield from (replace(each, before=before) for each in _matched(value, calls.get))


def _matched(node: ast.expr, source: Callable[[ast.expr], Any]) -> Iterator[Modulation]:
    """Yield the modulation that an expression is, or the sum of a norm's result, which has one argument; if any.

    Args:
        node: the expression.
        source: maps an expression to the call of a norm whose result the expression is, or to None.
    """
    if isinstance(node, ast.Call) and node.args and dotted(node.func):
        call, args, keywords = source(node.args[0]), node.args[1:], node.keywords
        operands = [*args, *(each.value for each in keywords if not isinstance(each.value, ast.Constant))]
        is_known = all(each.arg is not None for each in keywords) and all(map(_is_quiet, operands))
        if call is not None and len(operands) == 2 and is_known:
            yield Modulation(node, call, node.func, args, keywords)
    for product, shift in _terms(node, ast.Add):
        for rows, factor in _terms(product, ast.Mult):
            call, less = source(rows), _less_one(factor)
            if call is not None and less is not None and _is_quiet(less[0]) and _is_quiet(shift):
                yield Modulation(node, call, None, [less[0], shift], spent=(node, less[1]))
                return
        if (call := source(product)) is not None and _is_quiet(shift):
            yield Modulation(node, call, None, [shift])


def _terms(node: ast.expr, operator: type[ast.operator]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield both terms of an operation, in either order."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, operator):
        yield node.left, node.right
        yield node.right, node.left


def _less_one(factor: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return the scale of a factor 1 + scale, and the addition; `(1 + scale)[:, None]` gives `scale[:, None]`."""
    match factor:
        case ast.BinOp(ast.Constant(1), ast.Add(), scale) | ast.BinOp(scale, ast.Add(), ast.Constant(1)):
            return scale, factor
        case ast.Subscript(inner, at) if within := _less_one(inner):
            return ast.Subscript(within[0], at, ast.Load()), within[1]
        case ast.Call(ast.Attribute(inner, "unsqueeze" as name)) if within := _less_one(inner):
            return ast.Call(ast.Attribute(within[0], name, ast.Load()), factor.args, factor.keywords), within[1]
    return None


def dotted(node: ast.expr) -> str | None:
    """Return an expression's dotted name, or None if the expression is more than a name."""
    text = ast.unparse(node)
    return text if all(map(str.isidentifier, text.split("."))) else None


def _is_quiet(node: ast.expr) -> bool:
    return all(isinstance(each, _QUIET) or _is_view(each) for each in ast.walk(node))


def _is_view(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS


# Rotations


@dataclass(frozen=True, eq=False)
class Rotation:
    """A call `q, k = function(q, k, cos, sin)` in a forward, of the results of two norms.

    Attributes:
        node: the call.
        calls: the calls of the norms of q and of k.
    """

    node: ast.Call
    calls: tuple[Any, ...]

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of the norms in their module."""
        return tuple(call.func.attr for call in self.calls)


def _rotation_in(definition: ast.FunctionDef, first: str, code: types.CodeType) -> Rotation | None:
    """Return the rotation among a forward's own statements, which all run in turn; None if there is none."""
    for at, statement in enumerate(definition.body):
        before = definition.body[:at]
        match statement:
            case ast.Assign(
                [ast.Tuple([ast.Name(a), ast.Name(b)])],
                ast.Call(function, [ast.Name(q), ast.Name(k), *tables], []) as node,
            ) if (a, b) == (q, k) and q != k and len(tables) == 2 and dotted(function) and all(map(_is_quiet, tables)):
                # Inner functions may read what they share with the forward, and tables may not read what waits.
                is_apart = {q, k}.issubset({*code.co_varnames}.difference(code.co_cellvars)) and not any(
                    _mentions(each, name) for each in tables for name in (q, k)
                )
                calls = tuple(_normalised(name, before, first) for name in (q, k))
                if is_apart and all(calls) and not any(map(_may_write, before)):
                    return Rotation(node, calls)
    return None


def _normalised(name: str, statements: list[ast.stmt], first: str, shaped: tuple[str, ...] = ()) -> Any:
    """Return the call of a norm whose result a variable has after some statements, in another shape maybe.

    `shaped` has the methods that change the shape behind these statements, the last one first.
    """
    for statement in reversed(statements):
        if isinstance(statement, ast.If) and not statement.orelse and not _mentions(statement.test, name):
            # If the branch is not taken the norm is not called, and then no norm waits.
            if any(_mentions(each, name) for each in statement.body):
                return _normalised(name, statement.body, first, shaped)
        elif _mentions(statement, name):
            match statement:
                case ast.Assign([ast.Name(target)], value) if target == name:
                    rows, methods = _shaped(value, name)
                    shaped += methods
                    if methods and isinstance(rows, ast.Name) and rows.id == name:
                        continue
                    is_known = shaped == ("transpose", "view") or "view" not in shaped
                    return _call_of_norm(rows, first) if is_known else None
            return None
    return None


# The fields of nodes that name a variable.
_NAMING = ("id", "name", "asname", "rest")


def _mentions(node: ast.AST, name: str) -> bool:
    return any(getattr(each, field, None) == name for each in ast.walk(node) for field in _NAMING)


def _shaped(node: ast.expr, name: str) -> tuple[ast.expr, tuple[str, ...]]:
    """Return what an expression transposes, `x.transpose(1, 2)`, or views; and the methods, the last one first."""
    match node:
        case ast.Call(ast.Attribute(rows, "transpose"), [ast.Constant(1), ast.Constant(2)], []):
            method = "transpose"
        case ast.Call(ast.Attribute(rows, "view" | "reshape"), sizes, []) if all(
            _is_quiet(each) and not _mentions(each, name) for each in sizes
        ):
            method = "view"
        case _:
            return node, ()
    rows, methods = _shaped(rows, name)
    return rows, (method, *methods)


def _may_write(statement: ast.stmt) -> bool:
    """Return True if a statement's own text writes to a tensor: by `+=`, to a part or an attribute, or by `mul_()`."""
    for node in ast.walk(statement):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store) and not isinstance(node, (ast.Name, ast.Tuple))
        in_place = isinstance(node, ast.Attribute) and node.attr.endswith("_") and not node.attr.endswith("__")
        if is_stored or in_place or isinstance(node, ast.AugAssign) or getattr(node, "arg", None) == "out":
            return True
    return False


# Reading


@dataclass(frozen=True)
class Forward:
    """The forward of a class, read.

    Attributes:
        function: the function itself, without decorators.
        sums: its additions, in the order of the text, without those of inner scopes.
        modulations: its modulations of the results of norms. Pickles of blocks hold positions in this order.
        rotation: its rotation of the results of norms, if any.
    """

    function: types.FunctionType
    sums: tuple[Sum, ...]
    modulations: tuple[Modulation, ...]
    rotation: Rotation | None

    def sums_with(self, norms: Collection[str], modulated: Iterable[int]) -> list[Sum]:
        """Return the sums that are computed together with norms, and are part of no modulation that is replaced."""
        spent = {addition for which in modulated for addition in self.modulations[which].spent}
        return [each for each in self.sums if each.node not in spent and not each.norms.isdisjoint(norms)]


@cache
def read(cls: Any) -> Forward:
    """Read the forward of a class.

    Raises:
        LeftAloneError: its text is missing, or differs from the code that runs.
    """
    return _read(cls)[0]


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
    sums, modulations = _Run(definition, first).sums, []
    for each in _modulations_in(ast.Module(definition.body, []), first):
        if len(each.args) + len(each.keywords) == 1:
            sums[each.node].addend = each.call
        else:
            modulations.append(each)
    rotation = _rotation_in(definition, first, function.__code__)
    return Forward(function, tuple(sums.values()), tuple(modulations), rotation), tree, definition


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


# Each feature has a bit of its own.
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def outside(function: types.FunctionType, name: ast.expr) -> object:
    """Look up a dotted name outside of a function's own variables; return None if it is no such name."""
    path = dotted(name) or ""
    # A local variable may be anything.
    if path.partition(".")[0] in function.__code__.co_varnames:
        return None
    names = inspect.getclosurevars(function)
    space = types.SimpleNamespace(**{**names.builtins, **names.globals, **names.nonlocals})
    return attempt(partial(attrgetter(path), space), None)


# Rewriting


def calling(cls: Any, functions: Mapping[Any, str], keywords: Collection[str]) -> Callable[..., Any] | None:
    """Return a class's forward, decorated as before, that calls attributes of its module in place of functions.

    Args:
        cls: the class.
        functions: the functions, each with the name of the attribute that is called instead; methods also as
            `super().forward`.
        keywords: those that attributes take; calls with others stay.

    Returns:
        The forward; None if it calls none of the functions.

    Raises:
        LeftAloneError: the forward cannot be read, or a decorator holds the function in an unknown way.
    """
    forward, tree, definition = _read(cls)
    old, first, found = forward.function, definition.args.args[0].arg, False
    owner = inspect.getclosurevars(old).nonlocals.get("__class__")
    for node in ast.walk(definition):
        match node:
            case ast.Call(ast.Attribute(ast.Call(ast.Name("super"), [], []), "forward")):
                called, bound = getattr(super(owner, cls), "forward", None), [ast.Name(first, ast.Load())]
            case ast.Call():
                called, bound = outside(old, node.func), []
            case _:
                continue
        name = next((name for function, name in functions.items() if function is called), None)
        if name is not None and all(each.arg in keywords for each in node.keywords):
            found = True
            node.func, node.args = ast.Attribute(ast.Name(first, ast.Load()), name, ast.Load()), [*bound, *node.args]
    return _remade(cls, tree, old) if found else None


def rewritten(cls: Any, norms: Collection[str], modulated: Iterable[int], rotates: bool) -> Callable[..., Any]:
    """Return a class's forward, decorated as before, with some of its operations replaced by calls of ours.

    Args:
        cls: the class.
        norms: the names of the norms whose calls are replaced, with the sums that they are called with.
        modulated: the modulations to replace.
        rotates: whether to replace the rotation.

    Raises:
        LeftAloneError: the forward cannot be read, or a decorator holds the function in an unknown way.
    """
    # Read anew, because nodes are replaced in the tree.
    forward, tree, definition = _read(cls)
    modulations = [forward.modulations[which] for which in modulated]
    rotation = forward.rotation if rotates else None
    _Replacing(definition, forward.sums_with(norms, modulated), modulations, rotation, norms)
    return _remade(cls, tree, forward.function)


def _remade(cls: Any, tree: ast.Module, old: types.FunctionType) -> Callable[..., Any]:
    """Return a class's forward, decorated as before, compiled from the changed tree of its file."""
    code = _compiled(tree, old)
    # Without a super() there is no cell of the class.
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    return _decorated(cls.forward, old, _like(code, old, tuple([cells[name] for name in code.co_freevars])))


class _Replacing(ast.NodeTransformer):
    """Puts calls in the place of additions, norms and modulations, in the body of a function."""

    def __init__(
        self,
        definition: ast.FunctionDef,
        sums: list[Sum],
        modulations: list[Modulation],
        rotation: Rotation | None,
        norms: Collection[str],
    ) -> None:
        self._first = definition.args.args[0].arg
        self._sums = {each.node: each.behind for each in sums}
        self._norms = {name for each in sums for name in each.norms}.intersection(norms)
        self._addends = {each.addend for each in sums}
        self._branches = {branch for each in sums for branch in each.branches}
        self._modulations = {each.node: each for each in modulations}
        self._dropped = {each.before for each in modulations}
        self._rotated: Any = rotation and rotation.node
        self._waiting = dict(zip(rotation.calls, "qk", strict=True)) if rotation else {}
        definition.body = [node for node in map(self.visit, definition.body) if node is not None]
        for name, is_needed in ((SUMS, sums), (ROTARY, rotation)):
            if is_needed:
                begins = _called(self._first, name, [ast.Name(self._first, ast.Load())])
                definition.body.insert(0, ast.Assign([ast.Name(name, ast.Store())], begins))

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _SCOPES):
            return node
        if node in self._dropped:
            return None
        if node in self._modulations:
            return ast.copy_location(self._modulated(self._modulations[node]), node)
        self.generic_visit(node)
        if node in self._waiting:
            call: Any = node
            return _called(ROTARY, "normalise", [ast.Constant(self._waiting[node]), call.func, *call.args])
        if node is self._rotated:
            return ast.copy_location(_called(ROTARY, "rotate", [node.func, *node.args]), node)
        if isinstance(node, ast.If) and node in self._branches:
            node.body.insert(0, ast.Expr(_called(SUMS, "forget", [])))
        elif isinstance(node, ast.BinOp) and node in self._sums:
            behind = self._sums[node]
            norm = ast.Constant(behind if behind in self._norms else None)
            return ast.copy_location(_called(SUMS, "add", [norm, node.left, node.right]), node)
        elif (call := _call_of_norm(node, self._first)) is not None and call.func.attr in self._norms:
            method = "normalise_later" if node in self._addends else "normalise"
            return ast.copy_location(_called(SUMS, method, [call.func, *call.args]), node)
        return node

    def _modulated(self, modulation: Modulation) -> ast.Call:
        function = modulation.function or ast.Constant(None)
        rows, *args = map(self.visit, (*modulation.call.args, *modulation.args))
        keywords = [ast.keyword(each.arg, self.visit(each.value)) for each in modulation.keywords]
        return _called(self._first, MODULATE, [function, modulation.call.func, rows, *args], keywords)


def _called(owner: str, name: str, args: list[ast.expr], keywords: Iterable[ast.keyword] = ()) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(owner, ast.Load()), name, ast.Load()), args, list(keywords))


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

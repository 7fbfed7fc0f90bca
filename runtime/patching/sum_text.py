"""Find in the text of a forward the norms that are called with a sum, or whose input is added later.

The text is followed in the order in which it runs. The norm *directly behind* a sum is called before anything else that
could run code of anybody's: between the two there are assignments of names, and look-ups of names and attributes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .modulation_text import SCOPES, call_of_norm

# What runs no code that could change a tensor, once its parts have run. A look-up of an attribute is taken for one.
_QUIET = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Assign, ast.Expr, ast.Return, ast.BoolOp, ast.IfExp),
    *(ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
# Statements that run once, from their beginning to their end.
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.If)


class SumText:
    """The sums and calls of norms in a forward.

    Attributes:
        behind: by the id of an addition, the call of a norm directly behind it.
        inputs: by the id of an addition, the calls of norms before it whose input is one of its operands.
        branches: by the id of an addition, the branches between it and the norm. The norm is directly behind the sum
            only if the forward takes none of them.
    """

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.behind: dict[int, ast.Call] = {}
        self.inputs: dict[int, list[ast.Call]] = {}
        self.branches: dict[int, list[ast.If]] = {}
        self._first = definition.args.args[0].arg
        # The value of each variable: an expression's node, or an object for a value from elsewhere.
        self._values: dict[str, object] = {}
        self._calls: list[tuple[ast.Call, object]] = []
        # The addition that ran last, while nothing else ran since, and the branches since.
        self._last: ast.BinOp | None = None
        self._passed: list[ast.If] = []
        self._visit_all(definition.body)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self._visit(node)

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, _SIMPLE):
            self._last = None
        if isinstance(node, ast.If):
            self._visit_branches(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            self._visit(node.value)
            value = self._value(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._visit_all(targets)
            self._values |= {target.id: value for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, SCOPES):
            self._last = None
        else:
            self._visit_all(ast.iter_child_nodes(node))
            self._run(node)

    def _run(self, node: ast.AST) -> None:
        """Note a node whose parts ran."""
        last, stored = self._last, isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if isinstance(node, ast.Name) and stored:
            self._values[node.id] = node
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            operands = [self._value(node.left), self._value(node.right)]
            self.inputs[id(node)] = [call for call, value in self._calls if any(value is each for each in operands)]
            self._last, self._passed = node, []
        elif not _is_quiet(node) or (isinstance(node, ast.Attribute) and stored):
            self._last = None
        if isinstance(node, ast.Call) and call_of_norm(node, self._first) is not None:
            value = self._value(node.args[0])
            self._calls.append((node, value))
            if last is not None and value is last:
                self.behind[id(last)], self.branches[id(last)] = node, self._passed

    def _visit_branches(self, node: ast.If) -> None:
        self._visit(node.test)
        last, passed, before = self._last, self._passed, dict(self._values)
        for branch in (node.body, node.orelse):
            self._last = None
            self._visit_all(branch)
        if node.orelse:
            self._last = None
            after = self._values
            self._values = {name: value for name, value in after.items() if before.get(name) is value}
        else:
            # As if it were not taken: whoever takes it says so when it runs.
            self._last, self._passed, self._values = last, [*passed, node], before

    def _value(self, node: ast.expr) -> object:
        return self._values.setdefault(node.id, object()) if isinstance(node, ast.Name) else node


def _is_quiet(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops)
    return isinstance(node, _QUIET) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))

"""A parameter is declared once, in `codegen.parameters`: few places list the forward parameters by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from normforge.codegen.emit import MARKER
from normforge.codegen.parameters import FORWARD

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("runtime", "tools", "codegen")

# Where they are declared, and the axes of modes, many of which have the name of the parameter that decides them.
DECLARATIONS = ("codegen/parameters.py", "codegen/model.py")

NAMES = frozenset(row.name for row in FORWARD.parameters)
# Whoever has so many of them has to be edited when one is added.
MANY = 6
# The four functions of the functional API, two of which have an overload for each of what they return, and a module's
# constructor, JAX's two that quantise, two of gated norms, two of modulated ones, two of quantised ones and what hands
# on what they are given, and the oracle's four, which is to know nothing of the rows.
MOST = 22


def named(nodes: list[ast.expr | None]) -> set[str]:
    """The parameters among some expressions: variables, attributes, texts, or what a function is given alone."""
    found: set[str] = set()
    for node in nodes:
        value = node.value if isinstance(node, ast.Starred) else node
        if isinstance(value, ast.Call) and len(value.args) == 1:
            value = value.args[0]
        if isinstance(value, ast.Name):
            found.add(value.id)
        elif isinstance(value, ast.Attribute):
            found.add(value.attr)
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.add(value.value)
    return found & NAMES


def listed(node: ast.AST) -> set[str]:
    """The parameters that one signature, class, call or collection lists."""
    if isinstance(node, ast.FunctionDef):
        signature = node.args
        return {each.arg for each in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)} & NAMES
    if isinstance(node, ast.ClassDef):
        return named([each.target for each in node.body if isinstance(each, ast.AnnAssign)])
    if isinstance(node, ast.Call):
        return ({keyword.arg for keyword in node.keywords if keyword.arg} & NAMES) | named(list(node.args))
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return named(list(node.elts))
    if isinstance(node, ast.Dict):
        return named([*node.keys, *node.values])
    return set()


def lines(source: str) -> Iterator[int]:
    """Where a module lists many of them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.expr | ast.stmt) and len(listed(node)) >= MANY:
            yield node.lineno


def test_few_places_list_the_parameters_by_hand() -> None:
    places = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        # What is emitted from the rows is no list by hand.
        if name not in DECLARATIONS and MARKER not in source.partition("\n")[0]:
            places += [f"{name}:{line}" for line in lines(source)]
    assert len(places) <= MOST, "\n".join(places)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x, weight, bias, eps, residual, *, fadd): ...",
        "f(x, weight, bias, eps, residual=1, fadd=2)",
        "f(call.x, resolved(weight), call.bias, eps, *residual, fadd)",
        "('x', 'weight', 'bias', 'eps', 'residual', 'fadd')",
        "{'x': 1, 'weight': 2, 'bias': 3, 'eps': 4, 'residual': 5, 'fadd': 6}",
        "class Call:\n    x: int\n    weight: int\n    bias: int\n    eps: int\n    residual: int\n    fadd: int",
    ],
)
def test_a_list_of_them_is_found(source: str) -> None:
    assert list(lines(source)) == [1]
    assert not list(lines(source.replace("bias", "other")))

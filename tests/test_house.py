"""The house: what each package stands on, as its first lines say; no circle; no file or function that outgrows it."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from operator import gt
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen.emit import MARKER

ROOT = Path(__file__).resolve().parents[1]

# The folders that packages are in, by the names that they are imported under.
FOLDERS = {
    "normforge": "runtime",
    "normforge.codegen": "codegen",
    "normforge.tools": "tools",
    "benchmarks": "benchmarks",
    "proving": "proving",
}
# Whoever opens these wants all that is behind them.
DOORS = ("normforge", "normforge.__main__")

# Code lines, each at most: a line counts if it holds more than a comment or a docstring. These numbers only fall.
# The files that belong to no package are `normforge`; the budget for all of runtime/ is 11,000, and 800 for C.
MOST_CODE_LINES = {
    "all by hand": 15_056,
    "C": 776,
    "emitted": 1_419,
    "ahead_of_time": 684,
    "calls": 2_306,
    "families": 2_524,
    "compiled": 536,
    "integrations": 478,
    "jax": 804,
    "kernels": 1_272,
    "normforge": 496,
    "operators": 582,
    "override": 191,
    "parallel": 491,
    "patching": 1_889,
    "reference": 632,
    "selection": 728,
    "upstream": 667,
}
# Code lines of the folders beside runtime/; the goals are 30,000 and 6,000.
MOST_CODE_LINES_BESIDE = {("tests", "proving"): 29_928, ("benchmarks",): 5_921}
# Modules of ours that `import normforge` loads; the goal is 60.
MOST_MODULES = 60
# Of a call that is known, kernels interpreted: the functions of ours that it enters, and how often it goes on from an
# outer module after it was in an inner one.
MOST_STOPS = {
    "layer_norm": (10, 3),
    "rmsnorm2d_fwd": (7, 1),
    "gradients of layer_norm": (13, 5),
    "the operator of rmsnorm2d_fwd": (10, 2),
    "what Inductor calls for the operator": (8, 1),
}
# Of a function, its docstring aside.
LONGEST_FUNCTION = 80

Graph = Mapping[str, Iterable[str]]


@cache
def modules() -> dict[str, Path]:
    """Every module of these folders, by its name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


def imported(name: str) -> Iterator[str]:
    """The modules of these that a module imports, wherever in it, to run or for types alone."""
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join((*above, *([node.module] if node.module else [])))
            for alias in node.names:
                target = f"{origin}.{alias.name}"
                yield from (each for each in (target if target in modules() else origin,) if each in modules())


@cache
def graph() -> dict[str, frozenset[str]]:
    return {name: frozenset(imported(name)) - {name} for name in modules()}


def package_of(module: str) -> str:
    """The package that a module is in; "" for those of normforge itself, which hold what all share."""
    first, *rest = module.split(".")
    if first != "normforge":
        return first
    return rest[0] if rest and f"normforge.{rest[0]}" in packages() else ""


@cache
def packages() -> dict[str, str]:
    """The packages, and what the first lines of each say."""
    found = {f"normforge.{path.parent.name}": path for path in (ROOT / "runtime").glob("*/__init__.py")}
    found |= {name: ROOT / folder / "__init__.py" for name, folder in FOLDERS.items() if name != "normforge"}
    return {name: ast.get_docstring(ast.parse(path.read_text())) or "" for name, path in found.items()}


@cache
def floors() -> dict[str, set[str]]:
    """What each package may import."""
    return {name.rpartition(".")[2]: stands_on(text) or set() for name, text in packages().items()}


def stands_on(docstring: str) -> set[str] | None:
    """What a package may import by its docstring; None if that does not say."""
    said = re.search(r"Stands on (nothing|(?:\w+/(?:,\s|\sand\s)?)+)\.$", docstring)
    return None if said is None else set(re.findall(r"(\w+)/", said[1]))


def beyond(edges: Graph) -> list[str]:
    """The imports that no docstring allows."""
    found = []
    for module, targets in edges.items():
        package = package_of(module)
        # What all share stands on the generator's words alone.
        may = {"codegen"} if package == "" else floors()[package]
        wrong = [target for target in targets if package_of(target) not in {package, "", *may}]
        found += [f"{module} imports {target}" for target in wrong if module not in DOORS]
    return found


def circle(edges: Graph) -> list[str]:
    """A way from a module back to itself; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.mark.parametrize("name", packages())
def test_a_package_says_what_it_stands_on(name: str) -> None:
    may = stands_on(packages()[name])
    assert may is not None, f"{name} begins: {packages()[name]}"
    assert may <= floors().keys()


def test_no_package_stands_on_one_that_stands_on_it() -> None:
    assert circle(floors()) == []


def test_every_import_goes_down() -> None:
    assert beyond(graph()) == []


def test_nothing_imports_itself_by_others() -> None:
    assert circle(graph()) == []


def test_an_import_that_goes_up_is_told() -> None:
    up = {**graph(), "normforge.kernels.launcher": {"normforge.calls.plan"}}
    assert beyond(up) == ["normforge.kernels.launcher imports normforge.calls.plan"]
    assert {"normforge.kernels.launcher", "normforge.calls.plan"} <= {*circle(up)}
    assert beyond({"normforge.errors": {"normforge.selection.table"}})
    assert beyond({"benchmarks.run": {"normforge.compiled.rules"}})
    assert not beyond({"normforge.calls.plan": {"normforge.errors", "normforge.kernels.launcher"}})


@cache
def runtime() -> dict[str, str]:
    """The texts of runtime/ by their paths in it."""
    return {str(path.relative_to(ROOT / "runtime")): path.read_text() for path in (ROOT / "runtime").rglob("*.py")}


@cache
def by_hand() -> dict[str, str]:
    """The texts of runtime/ that no template wrote."""
    return {path: text for path, text in runtime().items() if MARKER not in text.partition("\n")[0]}


def code_lines(text: str) -> int:
    """Return how many lines of a Python text hold a token that is neither a comment nor a docstring."""
    lines: set[int] = set()
    opens = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            opens = True
        elif token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING):
            if not (opens and token.type == tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
            opens = False
    return len(lines)


def code_lines_of_c(text: str) -> int:
    """Return how many lines of a C text hold more than a comment."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in text.splitlines())


def test_the_runtime_is_thin() -> None:
    counts = Counter({"C": sum(code_lines_of_c(path.read_text()) for path in (ROOT / "runtime").rglob("*.c"))})
    for path, text in by_hand().items():
        package, inner, _ = path.partition("/")
        counts[package if inner else "normforge"] += code_lines(text)
    counts["all by hand"] = counts.total()
    counts["emitted"] = sum(code_lines(runtime()[path]) for path in runtime().keys() - by_hand().keys())
    assert counts.keys() == MOST_CODE_LINES.keys()
    assert {name: lines for name, lines in counts.items() if lines > MOST_CODE_LINES[name]} == {}


def test_tests_and_benchmarks_are_thin() -> None:
    counts = {
        folders: sum(code_lines(path.read_text()) for folder in folders for path in (ROOT / folder).rglob("*.py"))
        for folders in MOST_CODE_LINES_BESIDE
    }
    assert {folders: many for folders, many in counts.items() if many > MOST_CODE_LINES_BESIDE[folders]} == {}


def stops(call: Callable[[], object]) -> tuple[int, int]:
    """Return how many functions of ours a call enters, and how often it goes on from an outer module after that."""
    entered: list[str] = []
    back = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal back
        here, code = _module_of(frame), frame.f_code.co_name
        if event != "call" or here is None or code.startswith("<"):
            return
        caller = frame.f_back
        while caller is not None and _module_of(caller) is None:
            caller = caller.f_back
        outer = None if caller is None else _module_of(caller)
        back += bool(entered) and outer != entered[-1]
        entered.append(here)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered), back


def _module_of(frame: FrameType) -> str | None:
    """The module of ours that a frame is in; kernels are none."""
    name = str(frame.f_globals.get("__name__"))
    return name if name in modules() else None


def test_a_known_call_makes_few_stops() -> None:
    x, weight, bias = (torch.ones(*size, requires_grad=True) for size in ((4, 64), (64,), (64,)))

    def recorded() -> torch.Tensor:
        return normforge.layer_norm(x, (64,), weight, bias)

    def plain() -> object:
        return normforge.rmsnorm2d_fwd(x.detach(), weight.detach())

    operator: Any = torch.ops.normforge.rmsnorm2d_fwd.default
    words = (None, "none", None, "none", None, None, 0.0, None, None, torch.float32, False, "nearest", "after_weight")
    values = (x.detach(), weight.detach(), 1e-6, 0.0, *words)
    of_operator, at_once = (torch.no_grad()(partial(call, *values)) for call in (operator, operator.at_once))
    for known in (plain, of_operator, at_once):
        known()
    y = recorded()
    dy = torch.ones_like(y)
    torch.autograd.backward(y, dy, retain_graph=True)
    found = {
        "layer_norm": stops(recorded),
        "rmsnorm2d_fwd": stops(plain),
        "gradients of layer_norm": stops(lambda: torch.autograd.backward(y, dy)),
        "the operator of rmsnorm2d_fwd": stops(of_operator),
        "what Inductor calls for the operator": stops(at_once),
    }
    assert {name: many for name, many in found.items() if any(map(gt, many, MOST_STOPS[name]))} == {}


def test_code_lines_leave_comments_and_docstrings_out() -> None:
    text = (
        '"""One.\n\nTwo.\n"""\n\n# Three.\nx = (\n    "four"\n)  # Five.\n\n\ndef f():\n    """Six."""\n    return x\n'
    )
    assert code_lines(text) == 5
    assert code_lines_of_c("/* One.\n   Two. */\nint x; // Three.\n\n// Four.\n}\n") == 2


def test_no_function_is_long() -> None:
    texts = by_hand() | {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in ("codegen", "tools", "benchmarks", "proving")
        for path in (ROOT / folder).rglob("*.py")
    }
    lengths = {(path, name): length for path, text in texts.items() for name, length in functions(text)}
    assert {at: length for at, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def functions(text: str) -> Iterator[tuple[str, int]]:
    """The functions of a text, and their lines without those of their docstrings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            has_docstring = ast.get_docstring(node, clean=False) is not None
            documented = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - documented


def test_a_functions_length_leaves_its_docstring_out() -> None:
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    x = 1\n    return x\n'
    assert list(functions(text)) == [("f", 3)]


def test_the_environment_is_read_in_one_file() -> None:
    """But for TRITON_INTERPRET, which is Triton's own."""
    readers = {path for path, text in by_hand().items() if re.search(r"environ\b|getenv", text)}
    assert readers == {"settings.py", "calls/backend.py"}
    assert "NORMFORGE" not in by_hand()["calls/backend.py"]

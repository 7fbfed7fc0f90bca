"""Generated kernels as text: which parameters they have, and what else can be known without importing Triton."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..codegen.values import Part, Pipeline
from ..errors import TableError
from .table import FINALISER, Entry


@dataclass(frozen=True)
class Source:
    """A kernel of a generated folder.

    Attributes:
        module: the name that its module is imported by.
        symbol: its own name.
        path: the module's file.
        parameters: the names of what it takes, in order.
    """

    module: str
    symbol: str
    path: Path
    parameters: tuple[str, ...]

    @property
    def name(self) -> str:
        """The module and the symbol, joined by a colon."""
        return f"{self.module}:{self.symbol}"

    def load(self) -> Any:
        """The `triton.JITFunction`; imports Triton."""
        return getattr(importlib.import_module(self.module), self.symbol)


def source_of(entry: Entry, part: Pipeline | Part | None) -> Source:
    """A kernel of an instance; None is the one that adds up partial sums.

    Raises:
        TableError: the table's folder has no such kernel.
    """
    stem, symbol = FINALISER if part is None else (entry.mode, entry.kernel(part))
    module = f"{entry.package}.{stem}"
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin)
        parameters = _parameters(path).get(symbol)
        if parameters is not None:
            return Source(module, symbol, path, parameters)
    raise TableError(
        f"the dispatch table of {entry.package} lists {entry.name}, and there is no kernel {symbol} in {module}; "
        "generate the folder anew: python generate.py, or normforge generate"
    )


@cache
def _parameters(path: Path) -> Mapping[str, tuple[str, ...]]:
    """What each function of a module takes."""
    functions = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    return {function.name: tuple([argument.arg for argument in function.args.args]) for function in functions}

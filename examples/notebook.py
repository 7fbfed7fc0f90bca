"""Write `examples.ipynb`, the notebook of the scripts in this folder, from the scripts: each definition is a cell.

python examples/notebook.py [--check]
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE / "examples.ipynb"
NAMES = ("hugging_face", "fp8_block", "group_norm_unet", "frozen_server")

TITLE = """\
# normforge by example

Each section is a script of this folder. Kernels run on a GPU. Without one, set `TRITON_INTERPRET=1` before Jupyter
starts: Triton's interpreter then runs the kernels on the CPU, slowly.

`python examples/notebook.py` writes this notebook: edit a script and not a cell."""


def sections() -> dict[str, list[dict[str, Any]]]:
    """Return the cells of each script."""
    return {name: cells(name, (HERE / f"{name}.py").read_text()) for name in NAMES}


def cells(name: str, text: str) -> list[dict[str, Any]]:
    """Return a script's cells: its docstring, its imports and constants, each definition, and a call of `main`."""
    lines, nodes = text.splitlines(), ast.parse(text).body
    title, *rest = nodes
    parts, start = [""], title.end_lineno or 0
    for node in rest:
        end = node.end_lineno or 0
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            parts += ["\n".join(lines[start:end]), ""]
        elif not isinstance(node, ast.If) and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            parts[-1] += "\n".join(["", *lines[start:end]])
        start = end
    docstring = ast.get_docstring(ast.parse(text)) or ""
    code = [part.strip("\n") for part in (*parts, "main()") if part.strip()]
    return [cell("markdown", f"## {name}\n\n{docstring}"), *(cell("code", part) for part in code)]


def cell(kind: str, text: str) -> dict[str, Any]:
    """Return a cell of the notebook format, without outputs."""
    found: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return found | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook() -> str:
    """Return the notebook's text."""
    every = [cell("markdown", TITLE), *(each for section in sections().values() for each in section)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": every, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1) + "\n"


def main(argv: list[str]) -> int:
    """Write the notebook, or with --check compare it with the scripts; return the exit status."""
    if argv == ["--check"]:
        current = NOTEBOOK.is_file() and NOTEBOOK.read_text() == notebook()
        print(f"{NOTEBOOK.name} is {'up to date' if current else 'not that of the scripts; run examples/notebook.py'}")
        return 0 if current else 1
    NOTEBOOK.write_text(notebook())
    print(f"{NOTEBOOK.name}: {len(NAMES)} examples")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

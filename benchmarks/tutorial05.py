"""Triton's tutorial 05, the layer norm, imported from the user's copy of it: it is in no wheel, and none is kept here.

The file is named by NORMFORGE_TUTORIAL05, or found beside an installed checkout of Triton. It tests and times its
kernels wherever it is imported; those calls are left out here. As other peers', this module's import fails where the
tutorial is not there.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import triton

VARIABLE = "NORMFORGE_TUTORIAL05"
_NAME = "05-layer-norm.py"


def find() -> Path:
    """Return the tutorial's file.

    Raises:
        ImportError: there is none where it is looked for.
    """
    # A checkout that is installed in place has python/triton beside python/tutorials.
    beside = Path(str(triton.__file__)).resolve().parent.parent / "tutorials" / _NAME
    path = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else beside
    if not path.is_file():
        raise ImportError(
            f"there is no {path}; set {VARIABLE} to the file python/tutorials/{_NAME} of a checkout of Triton"
        )
    return path


def load(path: Path) -> ModuleType:
    """Run the tutorial's definitions, and none of the calls at its top level.

    Raises:
        ImportError: it defines no `layer_norm`.
        Exception: whatever its definitions raise, without a GPU for instance.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))]
    module = ModuleType("tutorial05")
    module.__file__ = str(path)
    # Under the file's own name and lines, where Triton looks up the source of a kernel.
    exec(compile(tree, str(path), "exec"), module.__dict__)
    if not hasattr(module, "layer_norm"):
        raise ImportError(f"{path} defines no layer_norm, as Triton's tutorial 05 does")
    return module


# (x, normalized_shape, weight, bias, eps) -> y, differentiable.
layer_norm: Callable[..., Any] = load(find()).layer_norm

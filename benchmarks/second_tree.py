"""Another revision of normforge in the same process, under another name, so that both are timed in turn.

Times of two processes differ by more than what a change of a call's Python makes; those of two calls in one do not.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

from .errors import UsageError

NAME = "normforge_beside"

# A checkout's folders, and where each lies in the package.
_FOLDERS = {"runtime": ".", "tools": "tools", "codegen": "codegen", "generated": "generated", "templates": "templates"}
# With the packages of folders that are loaded, which both trees count from 1.
_OURS = re.compile(r"\bnormforge(?=\b|_instances_)")


def load_tree(checkout: Path, scratch: Path) -> ModuleType:
    """Import a checkout's package as `normforge_beside`, with operators under that name too.

    Args:
        checkout: the root of another revision's tree.
        scratch: an empty folder, which must outlive the package.

    Raises:
        UsageError: the folder is no checkout of normforge, or cannot be imported beside this one.
    """
    if not (checkout / "runtime" / "__init__.py").is_file():
        raise UsageError(f"--beside {checkout} has no runtime/__init__.py; pass the root of a checkout of normforge")
    root = scratch / NAME
    for folder, place in _FOLDERS.items():
        if (checkout / folder).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(checkout / folder, root / place, ignore=ignored, dirs_exist_ok=True)
    for path in root.rglob("*"):
        if path.suffix in (".py", ".j2"):
            path.write_text(_OURS.sub(NAME, path.read_text()))
    sys.path.insert(0, str(scratch))
    try:
        return importlib.import_module(NAME)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--beside {checkout} cannot be imported: {error}") from error
    finally:
        sys.path.remove(str(scratch))

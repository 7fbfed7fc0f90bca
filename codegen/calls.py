"""The modules of the runtime that templates make from the rows of parameters: public functions, and types of calls."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import emit
from .errors import FolderError
from .families import Family, Parameter
from .jax_functions import JAX, JAX_NAMES
from .locking import replace_file
from .modules import GATED_MODULES, GROUP_MODULES, PLAIN_MODULES
from .parameters import (
    BACKWARD,
    FORWARD,
    GATED,
    GATED_GRADIENTS,
    GROUP,
    GROUP_BWD,
    MODULATED,
    MODULATED_GRADIENTS,
    QUANTISED,
)
from .public import FUNCTIONAL, PLAIN, PUBLIC, FunctionalFunctions, PublicFunctions
from .values import Norm

# The files of modules, by the folders of their families.
_MODULES = {"families": PLAIN_MODULES, "gated": GATED_MODULES, "group": GROUP_MODULES}
# Templates by the paths of the modules, from the repository's root.
TEMPLATES = {
    "runtime/families/functional.py": "functional.py.j2",
    "runtime/families/gated/functions.py": "modules.py.j2",
    "runtime/families/group/functions.py": "modules.py.j2",
    "runtime/families/operands.py": "operands.py.j2",
    "runtime/families/plain_functions.py": "functional.py.j2",
    "runtime/families/plain_modules.py": "modules.py.j2",
    "runtime/families/public.py": "calls.py.j2",
    "runtime/jax/functions.py": "jax_functions.py.j2",
}


@dataclass(frozen=True)
class CallsFile:
    """An emitted module of a checkout, with the text it should have.

    Attributes:
        path: the path of the file.
        shown: the path as messages name it.
        present: the text of the file; empty if the file is missing.
        text: the text it should have.
    """

    path: Path
    shown: Path
    present: str
    text: str

    @property
    def is_clean(self) -> bool:
        """Return True if the file has the text it should have."""
        return self.present == self.text

    def diff(self) -> Iterator[str]:
        """Yield the unified diff to the text that the file should have, line by line."""
        old, new = (text.splitlines(keepends=True) for text in (self.present, self.text))
        yield from difflib.unified_diff(old, new, str(self.shown), str(self.shown))

    def write(self) -> None:
        """Replace the file atomically: an interrupted run leaves the old file.

        Raises:
            FolderError: the file cannot be written.
            TemplateError: the text is not valid Python.
        """
        emit.check_python(str(self.path), self.text)
        try:
            replace_file(self.path, self.text)
        except OSError as error:
            raise FolderError(f"{self.path} cannot be written: {error.strerror}; mend that and run again") from error


def calls_files(root: Path, shown: Path) -> list[CallsFile]:
    """Return the modules of a checkout; none where the checkout has no runtime.

    Args:
        root: the checkout.
        shown: the checkout as messages name it.

    Raises:
        TemplateError: a template is missing or cannot be rendered.
    """
    paths = [(root / name, shown / name, name) for name in TEMPLATES]
    return [
        CallsFile(path, seen, path.read_text() if path.is_file() else "", render_calls(name))
        for path, seen, name in paths
        if path.parent.is_dir()
    ]


def render_calls(path: str) -> str:
    """Render a module of `TEMPLATES`.

    Raises:
        TemplateError: the template is missing or cannot be rendered.
    """
    families = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "modulated": MODULATED,
        "gated": GATED,
        "quantised": QUANTISED,
        "modulated_gradients": MODULATED_GRADIENTS,
        "gated_gradients": GATED_GRADIENTS,
        "group": GROUP,
        "group_backward": GROUP_BWD,
    }
    # One template writes the differentiable functions, or the modules, of norms alone, and those of other families.
    functional = PLAIN if path.endswith("plain_functions.py") else FUNCTIONAL
    module_file = _MODULES.get(Path(path).parent.name)
    rows = {
        **families,
        "public": PUBLIC,
        "functional": functional,
        "file": module_file,
        "jax": JAX,
        "jax_names": JAX_NAMES,
    }
    return emit.render(TEMPLATES[path], **rows, **_HELPERS)


def _filled(text: str) -> str:
    """Return a paragraph of a docstring, filled."""
    margin = " " * 4
    return textwrap.fill(
        " ".join(text.split()),
        emit.LINE_LENGTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _paragraph(text: str, indent: int, hanging: int = 4) -> str:
    """Return an entry of a docstring's list, filled."""
    margin = " " * indent
    return textwrap.fill(
        text,
        emit.LINE_LENGTH,
        initial_indent=margin,
        subsequent_indent=margin + hanging * " ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _passed(functions: PublicFunctions | FunctionalFunctions, norm: Norm, *, tensors: bool) -> str:
    """Return the operands or the options of a norm's function, in the order of rows.

    A row that the function has no argument for has its default; a norm that lacks it computes what that does.
    """
    names = [row.name for row in functions.family.of(norm)]
    rows = [row for row in functions.rows.parameters if row.functional and row.kind.is_tensor == tensors]
    defaults = [next(iter(row.default.values()), "") or "None" for row in rows]
    passed = [functions.renamed.get(row.name, row.name) for row in rows]
    items = [name if name in names else default for name, default in zip(passed, defaults, strict=True)]
    return ", ".join(items if tensors else [f'"{norm.value}"', *items])


def _fitted(before: str, items: str, after: str, indent: int) -> str:
    """Return items between brackets as the formatter sets them, or filled if the formatter would give each a line."""
    margin, inner = " " * indent, " " * (indent + 4)
    text = " ".join(items.split()).removesuffix(",")
    if before.endswith("= (") and "," not in text:
        text += ","
    one = f"{margin}{before}{text}{after}"
    if len(one) <= emit.LINE_LENGTH:
        return one
    if len(inner + text) <= emit.LINE_LENGTH and not before.endswith(("= (", "= {")):
        return f"{margin}{before}\n{inner}{text}\n{margin}{after}"
    # The formatter would give each item of a tuple or a dict a line. Items are never broken.
    joined = ", ".join(item.replace(" ", "\0") for item in text.split(", "))
    filled = textwrap.fill(f"{joined},", emit.LINE_LENGTH, initial_indent=inner, subsequent_indent=inner)
    return f"{margin}{before}\n{filled}\n{margin}{after}  # fmt: skip".replace("\0", " ")


def _import_enums(*families: Family, functional: bool = False) -> str:
    """Return the import of the enums whose members families take, or calls of their functional API alone."""
    rows = [row for family in families for row in family.parameters if row.functional or not functional]
    words = {row.words for row in rows if row.words is not None}
    modules = sorted({enum.__module__.rpartition(".")[2] for enum in words})
    return "\n".join(
        _import(f"..codegen.{module}", sorted(enum.__name__ for enum in words if enum.__module__.endswith(module)))
        for module in modules
    )


def _import(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= emit.LINE_LENGTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _names(rows: Sequence[Parameter]) -> str:
    """Return the names of rows."""
    return ", ".join(row.name for row in rows)


def _block(text: str) -> str:
    """Return the text of a macro of whole lines, without the newlines at both ends."""
    return text.strip("\n")


_HELPERS = {
    "block": _block,
    "names": _names,
    "passed": _passed,
    "filled": _filled,
    "paragraph": _paragraph,
    "fitted": _fitted,
    "import_enums": _import_enums,
}

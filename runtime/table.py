"""A folder of generated kernels: its dispatch table and its modules, imported when they are first needed."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .codegen.model import Part
from .errors import TableError

# The table layout this runtime reads; the generator writes the same number as FORMAT.
FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One instance of a table, and where its kernel lives.

    Attributes:
        name: the instance's name.
        mode: the mode's name, which is also its module's.
        kernel: the kernel's symbol.
        first: the shortest row served.
        last: the longest row served; None has no cap.
        bucket: the bucket's name.
        pipeline: how the kernel walks a row.
        rows: rows a program.
        block: columns a chunk.
        warps: warps a program.
        package: the package that holds the module.
    """

    name: str
    mode: str
    kernel: str
    first: int
    last: int | None
    bucket: str
    pipeline: str
    rows: int
    block: int
    warps: int
    package: str

    def serves(self, n: int) -> bool:
        """Whether rows of n elements are within first..last."""
        return self.first <= n and (self.last is None or n <= self.last)

    def load(self, part: Part | None = None) -> Any:
        """Import the module and return the kernel, or another that it needs: a `triton.JITFunction`."""
        symbol = self.kernel if part is None else f"{self.mode}_{part.value}"
        return self._load(self.mode, symbol)

    def load_finaliser(self) -> Any:
        """The kernel that adds up what a backward kernel leaves."""
        return self._load("finalise", "sum_partials")

    def _load(self, module: str, symbol: str) -> Any:
        try:
            return _kernel(self.package, module, symbol)
        except Exception as error:
            raise TableError(
                f"the dispatch table of {self.package} lists {self.name}, and its kernel {symbol} cannot be "
                f"loaded ({error}); generate the folder anew: python generate.py, or normforge generate"
            ) from error


@cache
def _kernel(package: str, module: str, symbol: str) -> Any:
    return getattr(importlib.import_module(f".{module}", package), symbol)


class Table:
    """A dispatch table: mode name to a ladder of entries that ascends by row length."""

    def __init__(self, package: str, ladders: dict[str, tuple[tuple[Any, ...], ...]], where: str) -> None:
        self.package = package
        self.where = where
        self._ladders = ladders
        # Modes share ladders, and each ladder's bounds are needed once; an open end sorts behind every N.
        self._bounds = {
            id(ladder): [sys.maxsize if last is None else last for _, last, *_ in ladder] for ladder in ladders.values()
        }

    def find(self, mode: str, n: int) -> Entry | None:
        """The entry that serves rows of n elements in a mode, or None."""
        ladder = self._ladders.get(mode)
        if ladder is None:
            return None
        index = bisect_left(self._bounds[id(ladder)], n)
        if index == len(ladder) or n < ladder[index][0]:
            return None
        return self._entry(mode, ladder[index])

    def __iter__(self) -> Iterator[Entry]:
        for mode, ladder in self._ladders.items():
            for row in ladder:
                yield self._entry(mode, row)

    def _entry(self, mode: str, row: tuple[Any, ...]) -> Entry:
        first, last, bucket, pipeline, rows, block, warps = row
        return Entry(
            name=f"{mode}_{bucket}",
            mode=mode,
            kernel=f"{mode}_{pipeline}",
            first=first,
            last=last,
            bucket=bucket,
            pipeline=pipeline,
            rows=rows,
            block=block,
            warps=warps,
            package=self.package,
        )


_folder_number = itertools.count(1)


def load_folder(folder: Path) -> Table:
    """Read the table of a folder that normforge generated.

    Raises:
        TableError: there is no such folder, or no table in it that this version reads.
    """
    package = import_folder(folder)
    return table_of(package, str(folder))


def import_folder(folder: Path) -> str:
    """Make a folder importable under a package name of its own, and return that name."""
    init = folder / "__init__.py"
    if not init.is_file():
        raise TableError(
            f"{folder} holds no generated kernels (no __init__.py); "
            f"make them: normforge generate --manifest FILE --out {folder}"
        )
    # A number, not the path, names the package: a folder generated anew is loaded anew.
    package = f"normforge_instances_{next(_folder_number)}"
    spec = importlib.util.spec_from_file_location(package, init, submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[package]
        raise TableError(f"{init} cannot be imported ({error}); generate the folder anew") from error
    return package


def table_of(package: str, where: str) -> Table:
    """The table of an importable package of generated kernels; `where` names it in messages."""
    try:
        dispatch = _read_dispatch(package)
    except Exception as error:
        raise TableError(
            f"{where} holds no dispatch table that can be read ({error}); "
            "generate it: python generate.py, or normforge generate"
        ) from error
    found = dispatch.get("FORMAT")
    if found != FORMAT:
        raise TableError(
            f"the dispatch table of {where} has format {found} and this normforge reads {FORMAT}; "
            "generate the folder anew with this version"
        )
    ladders = dispatch.get("TABLE")
    if not isinstance(ladders, dict):
        raise TableError(f"the dispatch.py of {where} defines no TABLE; generate the folder anew")
    return Table(package, ladders, where)


def _read_dispatch(package: str) -> dict[str, Any]:
    """What dispatch.py defines now; Python's bytecode cache tells an old file from a new one by whole seconds."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(".dispatch", package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no dispatch.py")
    names: dict[str, Any] = {}
    exec(compile(Path(spec.origin).read_bytes(), spec.origin, "exec"), names)
    return names

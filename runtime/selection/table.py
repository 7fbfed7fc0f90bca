"""A folder of generated kernels: the dispatch table, and the modules, as text and as lazy imports."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import pkgutil
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from ..call_kinds import MOST_ROWS_IN_I32, ROWS
from ..codegen.instance import ANY, Bucket, Tile, Tiles
from ..codegen.lazy import cached_property
from ..codegen.model import Mode
from ..codegen.tiling import SOME_M, is_ragged, narrowed
from ..codegen.values import Part, Pipeline
from ..errors import TableError

# The table layout that this runtime reads; the generator writes the number as FORMAT.
FORMAT = 8

# The module and the symbol of the kernel that adds up the partial sums of a backward kernel.
_FINALISER = ("finalise", "sum_partials")

# The tiles of a mode on one architecture, by buckets in ascending order.
_Ladder = dict[Bucket, Tiles]


@dataclass(frozen=True)
class Entry:
    """One instance of a table, with the package of its kernels.

    Attributes:
        name: the instance's name.
        mode: the mode's name, which is also the module's name.
        first: the shortest row served.
        last: the longest row served; None means no limit.
        bucket: the bucket's name.
        tiles: by architecture, `ANY` first.
        small_m: the most rows that take the tile for a few rows.
        some_m: the most rows that take the tile for some rows.
        package: the package that holds the module.
        is_invariant: whether the bits of a row are the same for every M. All tiles of an architecture are then one.
    """

    name: str
    mode: str
    first: int
    last: int | None
    bucket: str
    tiles: tuple[tuple[str, Tiles], ...]
    small_m: int
    some_m: int
    package: str
    is_invariant: bool = False

    @classmethod
    def of(
        cls, mode: str, bucket: Bucket, tiles: tuple[tuple[str, Tiles], ...], most: tuple[int, int], package: str
    ) -> Entry:
        """Return the instance of a mode and a bucket; `most` is small_m and some_m."""
        name = f"{mode}_{bucket.name}"
        return cls(name, mode, bucket.first, bucket.last, bucket.name, tiles, *most, package)

    @cached_property
    def invariant(self) -> Entry:
        """Return the instance for calls under batch invariance: with one tile per architecture."""
        tiles = tuple((arch, Tiles(own.for_every_m, own.for_every_m)) for arch, own in self.tiles)
        return replace(self, tiles=tiles, is_invariant=True)

    @cached_property
    def most_rows(self) -> tuple[int, int, int]:
        """Return the most rows of each class of M, in the order of `ROWS`; the last class has no end."""
        return self.small_m, self.some_m, MOST_ROWS_IN_I32

    def size(self, m: int) -> int:
        """Return the index in `ROWS` of the class of m rows."""
        return bisect_left(self.most_rows, m)

    def least_rows(self, each: int = 1) -> dict[str, int]:
        """Return the least M of each class among the multiples of a number; a class may have none."""
        multiples = [-(-(most + 1) // each) * each for most in (0, *self.most_rows)]
        return {word: m for size, (word, m) in enumerate(zip(ROWS, multiples, strict=True)) if self.size(m) == size}

    def serves(self, n: int) -> bool:
        """Return True if rows of n elements are within first..last."""
        return self.first <= n and (self.last is None or n <= self.last)

    def tile(self, m: int, n: int, arch: str) -> Tile:
        """Return the tile for m rows of n elements on an architecture.

        Args:
            m: the number of rows; only its class matters.
            n: a row length that the instance serves.
            arch: for example "sm_90" or "gfx942"; an architecture without tiles takes the tiles of `ANY`.
        """
        tiles = self.tiles_on(arch)
        tile = narrowed(tiles.by_rows[bisect_left((self.small_m, self.some_m), m)], n, self.last)
        if tiles.ragged is not None and m > self.some_m and is_ragged(Mode.from_name(self.mode), tile, n):
            return narrowed(tiles.ragged, n, self.last)
        return tile

    def choices(self, m: int, n: int, arch: str) -> tuple[Tile, Tile]:
        """Return the tile for m rows of n on an architecture, and the tile of `ANY` for GPUs too small for it."""
        return self.tile(m, n, arch), self.tile(m, n, ANY)

    def tiles_on(self, arch: str) -> Tiles:
        """Return the tiles on an architecture."""
        return next((tiles for name, tiles in self.tiles if name == arch), self.tiles[0][1])

    def kernel(self, part: Pipeline | Part) -> str:
        """Return the symbol of a pipeline's kernel or of a part's kernel, as `Mode.kernel` does."""
        return f"{self.mode}_{part.value}"

    def module_and_symbol(self, part: Pipeline | Part | None) -> tuple[str, str]:
        """Return the names of a kernel and its module; None is the kernel that adds up partial sums."""
        return _FINALISER if part is None else (self.mode, self.kernel(part))

    def load(self, part: Pipeline | Part | None) -> Any:
        """Import the module of a kernel and return the kernel, a `triton.JITFunction`."""
        module, symbol = self.module_and_symbol(part)
        try:
            return getattr(importlib.import_module(f".{module}", self.package), symbol)
        except (Exception, SystemExit) as error:
            raise TableError(
                f"the dispatch table of {self.package} lists {self.name}, and its kernel {symbol} cannot be "
                f"loaded ({error}); generate the folder anew: python generate.py, or normforge generate"
            ) from error


class Table:
    """A dispatch table: the entries of each mode, in ascending order of row length."""

    def __init__(self, where: str, entries: Iterable[Entry]) -> None:
        """Store the entries; `where` names the table in messages."""
        self.where = where
        self._by_mode: dict[str, list[Entry]] = {}
        for entry in entries:
            self._by_mode.setdefault(entry.mode, []).append(entry)

    def find(self, mode: str, n: int) -> Entry | None:
        """Return the entry that serves rows of n elements in a mode, or None."""
        return next((entry for entry in self._by_mode.get(mode, ()) if entry.serves(n)), None)

    def __iter__(self) -> Iterator[Entry]:
        return itertools.chain.from_iterable(self._by_mode.values())


class RetiledTable(Table):
    """Another table in which one instance has a single tile for every M and architecture."""

    def __init__(self, table: Table, entry: Entry, tile: Tile) -> None:
        retiled = replace(entry, tiles=((ANY, Tiles(tile, tile)),))
        super().__init__(table.where, [retiled, *[each for each in table if each.name != entry.name]])


_folder_number = itertools.count(1)


def load_folder(folder: Path) -> Table:
    """Read the table of a folder that normforge generated.

    Raises:
        TableError: the folder does not exist, or holds no table that this version reads.
    """
    return table_of(import_folder(folder), str(folder))


class _Source(SourceFileLoader):
    """A loader that compiles a module's source, and neither reads nor writes bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the current source."""
        return self.source_to_code(self.get_data(self.path), self.path)


def import_folder(folder: Path) -> str:
    """Make a folder importable under a new package name, from source alone, and return the name."""
    init = folder / "__init__.py"
    if not init.is_file():
        raise TableError(
            f"{folder} holds no generated kernels (no __init__.py); "
            f"make them: normforge generate --manifest FILE --out {folder}"
        )
    # A number, not the path, names the package, so that a folder generated anew is loaded anew.
    package = f"normforge_instances_{next(_folder_number)}"
    sys.path_importer_cache[str(folder)] = FileFinder(str(folder), (_Source, SOURCE_SUFFIXES))
    loader = _Source(package, str(init))
    spec = importlib.util.spec_from_file_location(
        package, init, loader=loader, submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[package]
        raise TableError(f"{init} cannot be imported ({error}); generate the folder anew") from error
    return package


def table_of(package: str, where: str) -> Table:
    """Return the table of an importable package of generated kernels; `where` names the table in messages."""
    try:
        if importlib.util.find_spec(".dispatch", package) is None:
            raise FileNotFoundError("no dispatch.py")
        dispatch = vars(importlib.import_module(".dispatch", package))
    except (Exception, SystemExit) as error:
        raise TableError(
            f"{where} holds no dispatch table that can be read ({error}); "
            "generate it: python generate.py, or normforge generate"
        ) from error
    version = dispatch.get("FORMAT")
    if version != FORMAT:
        raise TableError(
            f"the dispatch table of {where} has format {version} and this normforge reads {FORMAT}; "
            "generate the folder anew with this version"
        )
    # A table without tiles for some rows has no SOME_M.
    names = {"SOME_M": SOME_M, **dispatch}
    for name, kind in (("TABLE", dict), ("SMALL_M", int), ("SOME_M", int)):
        if not isinstance(names.get(name), kind):
            raise TableError(f"the dispatch.py of {where} defines no {name}; generate the folder anew")
    try:
        return Table(where, entries_of(package, names["TABLE"], names["SMALL_M"], names["SOME_M"]))
    except ValueError as error:
        raise TableError(f"the dispatch.py of {where} is damaged: {error}; generate the folder anew") from error


def entries_of(package: str, ladders: Mapping[Any, Any], small_m: int, some_m: int = SOME_M) -> Iterator[Entry]:
    """Yield the entries of the TABLE of a dispatch.py.

    Raises:
        ValueError: the table is damaged; the message says how.
    """
    # No class of M is empty.
    most = small_m, max(some_m, small_m + 1)
    # Modes share ladders.
    known: dict[int, _Ladder] = {}
    for mode, by_arch in ladders.items():
        if not isinstance(mode, str) or not mode.isidentifier():
            raise ValueError(f"{mode!r} is no mode's name")
        if not isinstance(by_arch, dict) or ANY not in by_arch:
            raise ValueError(f"{mode} has no rows for architectures that have none of their own")
        known |= {id(rows): _ladder(rows) for rows in by_arch.values() if id(rows) not in known}
        parsed = {arch: known[id(rows)] for arch, rows in by_arch.items()}
        for arch, ladder in parsed.items():
            if not ladder or ladder.keys() != parsed[ANY].keys():
                raise ValueError(f"the rows of {mode} for {arch!r} are no ascending row lengths with their tiles")
        for bucket in parsed[ANY]:
            yield Entry.of(mode, bucket, tuple([(arch, parsed[arch][bucket]) for arch in parsed]), most, package)


def _ladder(rows: Any) -> _Ladder:
    """Return the tiles of a ladder of a dispatch.py by buckets; none if the ladder is damaged.

    A row is (first, last, bucket, tile for many rows, tile for a few, and the optional tiles, as in `Tiles.row`).
    """
    ladder: _Ladder = {}
    least = 1
    try:
        for first, last, bucket, *tiles in rows:
            if not isinstance(bucket, str):
                return {}
            _counted(first, least)
            least = sys.maxsize + 1 if last is None else _counted(last, first) + 1
            ladder[Bucket(bucket, first, last)] = Tiles(*map(_tile, tiles))
    except (TypeError, ValueError):
        return {}
    return ladder


def _tile(row: Any) -> Tile:
    """Return a tile, of which a dispatch.py has the pipeline's word and then the other fields in order."""
    word, *numbers = row
    tile = Tile(Pipeline(word), *numbers)
    for field in fields(Tile)[1:]:
        # Only `held` may be 0.
        _counted(getattr(tile, field.name), 0 if field.name == "held" else 1)
    return tile


def _counted(value: Any, least: int = 1) -> int:
    """Return a number that is whole and not less than another, or raise a ValueError."""
    if type(value) is not int or not least <= value <= sys.maxsize:
        raise ValueError(f"{value!r} is no whole number from {least}")
    return value


class Source(NamedTuple):
    """A kernel of a generated folder.

    Attributes:
        name: the module's import name and the kernel's name, joined by a colon.
        path: the module's file.
        parameters: the names of the kernel's parameters, in order.
    """

    name: str
    path: Path
    parameters: tuple[str, ...]

    def load(self) -> Any:
        """Import Triton and return the `triton.JITFunction`."""
        return pkgutil.resolve_name(self.name)


def source_of(package: str, stem: str, symbol: str) -> Source:
    """Return a kernel of a package of generated kernels, given the names of its module and itself.

    Raises:
        TableError: the package does not have the kernel.
    """
    module = f"{package}.{stem}"
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin)
        parameters = _parameters(path).get(symbol)
        if parameters is not None:
            return Source(f"{module}:{symbol}", path, parameters)
    raise TableError(
        f"the dispatch table of {package} lists the modes of {stem}, and there is no kernel {symbol} in {module}; "
        "generate the folder anew: python generate.py, or normforge generate"
    )


@cache
def _parameters(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the parameters of each function of a module."""
    functions = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    return {function.name: tuple([argument.arg for argument in function.args.args]) for function in functions}

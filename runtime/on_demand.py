"""The bridge to the generator: makes an instance that the loaded table lacks, in the user's cache folder.

Imported on a miss only, and never under NORMFORGE_ON_MISS=error; it is the one part of the runtime that needs jinja2.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from ._version import __version__
from .codegen import emit, tiling
from .codegen.model import Instance, Mode
from .codegen.tile_tables import tiles_of
from .errors import CacheError
from .table import Entry, import_folder, make_tile

logger = logging.getLogger("normforge")


def plan(mode: Mode, n: int, package: str = "") -> Entry:
    """The entry that `generate` would make, over the standard ladder."""
    bucket = next(bucket for bucket in tiling.standard_ladder() if n in bucket)
    instance = Instance(mode, bucket, tiles_of(mode, bucket))
    return Entry(
        name=instance.name,
        mode=mode.name,
        first=bucket.first,
        last=bucket.last,
        bucket=bucket.name,
        tiles=tuple(
            (arch, (make_tile(mode.name, tiles.large), make_tile(mode.name, tiles.small)))
            for arch, tiles in instance.tiles
        ),
        small_m=tiling.SMALL_M,
        package=package,
    )


def generate(mode: Mode, n: int, table: str) -> Entry:
    """Write the module of a mode into the cache and return the entry that serves n.

    Several processes may do this at once: each file is replaced whole, and all write the same bytes. The folder is
    named after the version and the templates, so that kernels of another generator are never used.

    Args:
        mode: what the call asked for.
        n: its row length.
        table: where the loaded table came from, for the log.

    Raises:
        CacheError: the cache folder cannot be written.
    """
    folder = cache_folder()
    # All pipelines, so that the bytes do not depend on which row length came first.
    module = emit.render_module(mode, mode.pipelines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (emit.shared_files(backward=True) | {f"{mode.name}.py": module}).items():
            _replace(folder / name, text)
    except OSError as error:
        raise CacheError(
            f"no kernel for {mode.name} is loaded, and none can be generated into {folder} ({error}); "
            "set NORMFORGE_CACHE to a folder that can be written, or add the instance to a manifest"
        ) from error
    # The import system remembers what a folder held.
    importlib.invalidate_caches()
    entry = plan(mode, n, _package(folder))
    logger.info("generated %s into %s: %s does not hold it", entry.name, folder, table)
    return entry


def cache_folder() -> Path:
    """Where this version with these templates keeps what it generates."""
    root = os.environ.get("NORMFORGE_CACHE")
    if root:
        base = Path(root).expanduser().resolve()
    else:
        import platformdirs

        base = platformdirs.user_cache_path("normforge", appauthor=False)
    return base / f"{__version__}-{_generator_digest()}"


@cache
def _generator_digest() -> str:
    digest = hashlib.sha256()
    sources = [*emit.TEMPLATES.glob("*.j2"), *Path(emit.__file__).parent.glob("*.py")]
    for source in sorted(sources, key=lambda path: (path.parent.name, path.name)):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _package(folder: Path) -> str:
    return import_folder(folder)


def _replace(path: Path, text: str) -> None:
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise

"""The bridge to the generator: generate an instance that the loaded table lacks, in the user's cache folder.

The module is imported on a miss only, and never under NORMFORGE_ON_MISS=error. No other part of the runtime needs
jinja2.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from functools import cache
from pathlib import Path

from .. import settings
from .._version import __version__
from ..codegen import emit, tiling
from ..codegen.groups import AnyMode
from ..codegen.locking import replace_file
from ..codegen.several import Kernels, name_of
from ..codegen.tile_tables import tiles_of
from ..errors import CacheError
from .table import Entry, Source, import_folder, source_of

logger = logging.getLogger("normforge")

# Modes of folders and files, before the umask: others may read, and only owner and group may write imported code.
_FOLDER_MODE, _FILE_MODE = 0o775, 0o664


def plan(mode: AnyMode, n: int, package: str = "") -> Entry:
    """Return the entry that `generate` would make, over the standard ladder."""
    bucket = next(bucket for bucket in tiling.standard_ladder() if n in bucket)
    return Entry.of(mode.name, bucket, tiles_of(mode, bucket), (tiling.SMALL_M, tiling.SOME_M), package)


def generate(mode: AnyMode, n: int, table: str) -> Entry:
    """Write the module of a mode into the cache, if the cache lacks the module, and return the entry that serves n.

    Several processes may generate at once: each file is replaced whole, and all processes write the same bytes. The
    folder is named after the version and the templates, so that kernels of another generator are never used. Each
    existing file is compared with the generator's output, and nothing else in the folder is imported: no bytecode and
    no extension module (`import_folder`). Only users who could run code in this process anyway may write to the folder.

    Args:
        mode: the mode that the call asked for.
        n: the call's row length.
        table: where the loaded table came from, for the log.

    Raises:
        CacheError: the cache folder cannot be written, or other users can write to the folder.
    """
    # All pipelines, so that the bytes do not depend on the row length that came first.
    package, is_new = _add(mode.name, emit.render_module(mode, mode.pipelines), "add the instance to a manifest")
    entry = plan(mode, n, package)
    if is_new:
        logger.info("generated %s into %s: %s does not hold it", entry.name, cache_folder(), table)
    else:
        logger.debug("found %s in %s: %s does not hold it", entry.name, cache_folder(), table)
    return entry


def several(kernels: Kernels) -> Source:
    """Return the kernel that calls some forward kernels, from a module that is written as `generate` writes one.

    Raises:
        CacheError: for the reasons of `generate`.
    """
    name = name_of(kernels)
    package, _ = _add(name, emit.render_several(kernels), "set NORMFORGE_ON_MISS=error for a launch each")
    return source_of(package, name, name)


def _add(name: str, module: str, otherwise: str) -> tuple[str, bool]:
    """Write a module into the cache, if the cache lacks the module; return the cache's package, and if it was written.

    Args:
        name: the module's name.
        module: the module's text.
        otherwise: what a user whose cache cannot be written can do, for the error.

    Raises:
        CacheError: for the reasons of `generate`.
    """
    folder = cache_folder()
    try:
        folder.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        why = settings.why_open(folder, owned=2)
        if why is not None:
            # Another user could have put code there.
            raise CacheError(
                f"{why}, and kernels are imported from {folder}; set NORMFORGE_CACHE to a folder of your own that no "
                "other user may write to"
            )
        for shared, text in emit.shared_files(backward=True, groups=True, peers=True).items():
            _replace(folder / shared, text)
        is_new = _replace(folder / f"{name}.py", module)
    except CacheError:
        raise
    except OSError as error:
        raise CacheError(
            f"no kernel for {name} is loaded, and none can be generated into {folder} ({error}); "
            f"set NORMFORGE_CACHE to a folder that can be written, or {otherwise}"
        ) from error
    # The import system caches the listing of a folder.
    importlib.invalidate_caches()
    return _package(folder), is_new


def cache_folder() -> Path:
    """Return the folder of the kernels that this version generates with these templates."""
    base = settings.cache()
    if base is None:
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


_package = cache(import_folder)


def _replace(path: Path, text: str) -> bool:
    """Write a file unless the file holds the text already; return True if the file was written."""
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    replace_file(path, data, _FILE_MODE)
    return True

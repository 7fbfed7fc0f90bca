"""The verb: compile what tiles choose for GPUs that are not here, and write what the model says of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

from ..environment import ROOT, revision_of
from ..errors import UsageError
from ..pages import put_into
from ..progress import progress_to
from .devices import DEVICES
from .model import every_case, model_all
from .table import FOLDER, describe, load, save, unknown

# Between which markers of a page the table is put.
MARKERS = "tile-model"
_PACKAGES = ("torch", "triton", "normforge")


def model_tiles(options: argparse.Namespace, _: list[str]) -> int:
    """Run the verb, and print what it says; with a page to put it into, of the table that is there.

    Raises:
        UsageError: there is no table, or the page lacks the markers.
    """
    folder = options.out or FOLDER
    if options.into is None:
        cases = every_case()
        with progress_to(len(cases), what="model", unit="tile") as progress:
            save(folder, header(options.revision), model_all(cases, options.jobs, progress.update))
    found = load(folder)
    if found is None:
        raise UsageError(f"{folder} holds no table; make one with `python -m benchmarks model-tiles`")
    text = describe(*found)
    if options.into is not None:
        put_into(options.into, text, MARKERS)
        print(f"the table in {options.into} is that of {folder}")
        return 0
    print(text)
    wrong = unknown(found[1])
    for row, fault in wrong:
        print(f"{fault}: {row.kernel} on {row.arch}, N = {row.n}, {row.rows} rows, tile {row.tile}")
    return 1 if wrong else 0


def header(revision: str | None) -> dict[str, str]:
    """Which GPUs stand for architectures, and with what kernels are compiled for them."""
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    devices = ", ".join(device.name for device in DEVICES.values())
    return {
        "devices": devices,
        "python": platform.python_version(),
        **versions,
        "revision": revision or revision_of(ROOT),
    }

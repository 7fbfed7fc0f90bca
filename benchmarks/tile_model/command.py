"""The verb: compile what tiles choose for GPUs that are not here, and write what the model says of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

from ..environment import ROOT, revision_of
from ..errors import UsageError
from ..progress import progress_to
from .devices import DEVICES
from .model import every_case, model_all
from .table import FOLDER, describe, load, save, unknown

_PACKAGES = ("torch", "triton", "normforge")


def model_tiles(options: argparse.Namespace, _: list[str]) -> int:
    """Model every tile and save the table with its summary, or summarise the table that is there.

    Raises:
        UsageError: there is no table.
    """
    folder = options.out or FOLDER
    if not options.summarise:
        cases = every_case()
        with progress_to(len(cases), what="model", unit="tile") as progress:
            save(folder, header(options.revision), model_all(cases, options.jobs, progress.update))
    found = load(folder)
    if found is None:
        raise UsageError(f"{folder} holds no table; make one with `python -m benchmarks model-tiles`")
    text = describe(*found)
    (folder / "summary.txt").write_text(f"revision: {found[0]['revision']}\n\n{text}\n")
    print(text)
    wrong = unknown(found[1])
    for row, fault in wrong:
        print(f"{fault}: {row.kernel} on {row.arch}, N = {row.n}, {row.rows} rows, tile {row.tile}")
    return 1 if wrong else 0


def header(revision: str | None) -> dict[str, str]:
    """Return the GPUs that represent architectures, and the versions that kernels are compiled with."""
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    devices = ", ".join(device.name for device in DEVICES.values())
    return {
        "devices": devices,
        "python": platform.python_version(),
        **versions,
        "revision": revision or revision_of(ROOT),
    }

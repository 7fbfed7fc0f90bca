"""With what something is measured: the device, its driver, versions, and the revision."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch
import triton

from .._version import __version__
from .machine import Machine

NOT_KNOWN = "not known"


def describe(machine: Machine) -> dict[str, str]:
    """Device, driver and versions, by name."""
    return {
        "device": machine.name,
        "driver": _driver() if machine.device.type == "cuda" else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "cuda": str(torch.version.cuda or torch.version.hip or "none"),
        "normforge": __version__,
    }


def revision_of(root: Path, written: str) -> str:
    """Return the git revision of a checkout, with a note if files have changed since; `NOT_KNOWN` without a checkout.

    Args:
        root: the root of a checkout. A package that is installed into another project's checkout has no revision.
        written: the folder that results are written into; changes in the folder do not count.
    """
    top = _output("git", "rev-parse", "--show-toplevel", at=root)
    if top == NOT_KNOWN or not Path(top).samefile(root):
        return NOT_KNOWN
    revision = _output("git", "rev-parse", "--short", "HEAD", at=root)
    changed = _output("git", "status", "--porcelain", "--", ".", f":!{written}", at=root)
    return f"{revision}, with changes" if changed else revision


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _output(*command: str, at: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return NOT_KNOWN
    return done.stdout.strip()

"""Where and with what a run was made: the header of its results."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

import normforge
from normforge.tools.machine import Machine

from .provider import Provider

ROOT = Path(__file__).resolve().parent.parent
_NO_ANSWER = "not known"


def describe(machine: Machine, providers: Iterable[Provider], revision: str | None) -> dict[str, str]:
    """The header: device, driver, versions, and the revision, from git unless it is given."""
    header = {
        "device": machine.name,
        "driver": _driver() if machine.device.type == "cuda" else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": str(triton.__version__),
        "cuda": str(torch.version.cuda or torch.version.hip or "none"),
        "normforge": normforge.__version__,
    }
    header |= {provider.distribution: provider.version() for provider in providers if provider.distribution}
    return header | {"revision": revision or revision_of(ROOT)}


def folder_name(machine: Machine) -> str:
    """The device's name as a folder's: `h200` for an NVIDIA H200."""
    if machine.device.type == "cpu":
        return "cpu"
    words = machine.name.lower().replace("/", "-").split()
    return "-".join(word for word in words if word not in ("nvidia", "amd", "instinct")) or "gpu"


def revision_of(root: Path) -> str:
    """The revision that a checkout is at, by git, and whether it was changed since."""
    revision = _output("git", "rev-parse", "--short", "HEAD", at=root)
    if revision == _NO_ANSWER:
        return revision
    # Results are written into the tree while it is measured, and do not change what is measured.
    changed = _output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results", at=root)
    return f"{revision}, with changes" if changed else revision


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _output(*command: str, at: Path = ROOT) -> str:
    try:
        done = subprocess.run(command, cwd=at, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return _NO_ANSWER
    return done.stdout.strip()

"""The machine and versions of a run: the header of its results."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from normforge.errors import DeviceError
from normforge.tools import environment
from normforge.tools.machine import Machine, find_machine

from .errors import UsageError
from .provider import Provider

ROOT = Path(__file__).resolve().parent.parent


def machine_here() -> Machine:
    """Return the machine that kernels run on.

    Raises:
        UsageError: there is none.
    """
    try:
        return find_machine()
    except DeviceError as error:
        raise UsageError(str(error)) from None


def find_gpu(verb: str) -> Machine:
    """Return the GPU that kernels run on.

    Raises:
        UsageError: there is none, or they are interpreted.
    """
    machine = machine_here()
    if machine.interpreted:
        raise UsageError(
            f"{verb} needs a GPU, and kernels are interpreted here; run it on one, without TRITON_INTERPRET"
        )
    return machine


def describe(machine: Machine, providers: Iterable[Provider], revision: str | None) -> dict[str, str]:
    """Return the header: device, driver, versions, and the revision, from git unless one is given."""
    header = environment.describe(machine)
    if kernels := rms_norm_kernels():
        header["torch rms_norm"] = kernels
    header |= {provider.distribution: provider.version() for provider in providers if provider.distribution}
    return header | {"revision": revision or revision_of(ROOT)}


def rms_norm_kernels() -> str:
    """Whose kernels torch's RMSNorm takes on CUDA: from 2.13 on QuACK's, where a CuTe DSL that it knows is installed.

    Returns:
        Nothing of a torch that has no such choice.
    """
    try:
        registry: Any = importlib.import_module("torch._native.registry")
        overridden = registry.get_dsl_operations("cutedsl")
    except (ImportError, AttributeError):
        return ""
    return "QuACK's" if "_fused_rms_norm" in overridden else "its own"


def folder_name(machine: Machine) -> str:
    """Return the device's name as a folder's: `h200` for an NVIDIA H200."""
    if machine.device.type == "cpu":
        return "cpu"
    words = machine.name.lower().replace("/", "-").split()
    return "-".join(word for word in words if word not in ("nvidia", "amd", "instinct")) or "gpu"


def revision_of(root: Path) -> str:
    """Return the revision of a checkout, by git, and whether the checkout was changed since."""
    return environment.revision_of(root, "benchmarks/results")

"""`normforge doctor`: what is here, what is set, and what keeps kernels from running."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import settings
from .._version import __version__
from ..codegen.command import DIFFERS, DONE
from ..errors import NormforgeError
from ..kernels import binaries
from ..kernels.gpu import interpreting, target_of
from ..selection import dispatch
from ..selection.on_demand import cache_folder
from ..settings import why_open
from ..upstream import triton_launcher

_SETTINGS: dict[str, Callable[[], Any]] = {
    "NORMFORGE_AOT": settings.compiled_ahead,
    "NORMFORGE_BATCH_INVARIANT": settings.batch_invariant,
    "NORMFORGE_CACHE": settings.cache,
    "NORMFORGE_FROZEN": settings.frozen,
    "NORMFORGE_FUSE_FROM": settings.fuse_from,
    "NORMFORGE_INSTANCES": settings.instances,
    "NORMFORGE_NATIVE_LAUNCHER": settings.native_launcher,
    "NORMFORGE_ON_MISS": settings.generates,
    "NORMFORGE_RECORD": settings.recording,
}


class _Report:
    """Facts by name, and problems, each with what to do."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.problems: list[str] = []

    def ask(self, name: str, question: Callable[[], str]) -> None:
        """Add a fact, or the error that the question raises as a problem."""
        try:
            self.facts[name] = question()
        except NormforgeError as error:
            self.facts[name] = "not known"
            if str(error) not in self.problems:
                self.problems.append(str(error))

    def look(self) -> None:
        """Look at everything."""
        self.facts["normforge"] = __version__
        self.facts["Python"] = platform.python_version()
        self.facts["system"] = platform.platform()
        self.facts["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda or torch.version.hip or 'none'}"
        self.facts["Triton"] = self._triton()
        self._settings()
        has_triton = self.facts["Triton"] != "none"
        self.facts["interpreter"] = "on" if has_triton and interpreting() else "off"
        self._gpu(self.facts["interpreter"] == "on")
        self.ask("table", lambda: f"{sum(1 for _ in dispatch.loaded())} instances of {dispatch.loaded().where}")
        self.ask("ahead of time", self._ahead_of_time)
        self.ask("C launcher", self._launcher)
        self.ask("cache", self._cache)
        if has_triton:
            self.ask("Triton's cache", self._triton_cache)

    def _triton(self) -> str:
        try:
            return version("triton")
        except PackageNotFoundError:
            self.problems.append("Triton is not installed, and kernels need Triton; run pip install triton")
            return "none"

    def _settings(self) -> None:
        for name in sorted(name for name in os.environ if name.startswith("NORMFORGE_")):
            self.facts[name] = os.environ[name]
            if name not in _SETTINGS:
                self.problems.append(f"{name} is no setting of normforge's; the settings are {', '.join(_SETTINGS)}")
                continue
            try:
                _SETTINGS[name]()
            except NormforgeError as error:
                self.problems.append(str(error))

    def _gpu(self, interpreted: bool) -> None:
        if torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            arch = target_of(device).arch
            self.facts["GPU"] = f"{torch.cuda.get_device_name(device)} ({arch})"
            self.ask("tiles", lambda: _tiles(arch))
            return
        self.facts["GPU"] = "none"
        if not interpreted:
            built = torch.version.cuda or torch.version.hip
            self.problems.append(
                f"no GPU was found{'' if built else ' by this torch, which was built for CPUs alone,'} and the "
                "interpreter is off, so torch's operators run; use a machine with a GPU, or set TRITON_INTERPRET=1 to "
                "run kernels on the CPU, slowly"
            )

    def _ahead_of_time(self) -> str:
        folder = binaries.loaded()
        return "no folder" if folder is None else f"{len(folder.rows)} kernels for {folder.arch} in {folder.path}"

    def _launcher(self) -> str:
        if not settings.native_launcher():
            return "switched off by NORMFORGE_NATIVE_LAUNCHER=0"
        try:
            launcher = triton_launcher.load(build=not settings.frozen())
        except NormforgeError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if torch.cuda.is_available():
                self.problems.append(
                    f"the C launcher was not built ({why}), and Triton builds what launches its kernels in the same "
                    "way; install gcc or clang, or name a compiler in CC"
                )
            return (
                f"not built ({why}); launches take more host time without it. It needs gcc or clang, and Triton's cache"
            )
        return "built" if launcher else "not built, and NORMFORGE_FROZEN=1 forbids building"

    def _cache(self) -> str:
        folder = cache_folder()
        why = _why_unwritable(folder) or (why_open(folder, owned=2) if folder.exists() else None)
        if why is not None:
            self.problems.append(
                f"{why}, and kernels are generated into {folder}; set NORMFORGE_CACHE to another folder"
            )
        return f"{folder} ({'writable' if why is None else 'not usable'})"

    def _triton_cache(self) -> str:
        import triton

        folder = Path(triton.knobs.cache.dir)
        if (why := _why_unwritable(folder)) is not None:
            self.problems.append(
                f"{why}, and Triton keeps compiled kernels and launchers in {folder}; set TRITON_CACHE_DIR to another "
                "folder"
            )
        return f"{folder} ({'writable' if why is None else 'not usable'})"


def _why_unwritable(folder: Path) -> str | None:
    """Return why no file can be made in a folder, or in the nearest folder above that exists; None if one can."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        # A full disk and /proc let os.access pass.
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{there} cannot be written ({error.strerror})"


def _tiles(arch: str) -> str:
    measured = any(arch == name for name, _ in next(iter(dispatch.loaded())).tiles)
    return (
        f"measured for {arch}" if measured else f"not measured for {arch}, which takes those of any GPU: normforge tune"
    )


def main(args: argparse.Namespace) -> int:
    """Run `normforge doctor`; returns 0, or 1 if the report names a problem."""
    report = _Report()
    report.look()
    if args.json:
        print(json.dumps({"ok": not report.problems, "facts": report.facts, "problems": report.problems}))
    else:
        width = max(map(len, report.facts))
        print("\n".join(f"{name:<{width}}  {fact}" for name, fact in report.facts.items()))
        print(
            "\n".join(
                ["", *(f"problem: {problem}" for problem in report.problems)] if report.problems else ["\nno problems"]
            )
        )
    return DIFFERS if report.problems else DONE

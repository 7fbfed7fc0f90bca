"""A libcuda.so.1 for a machine without a GPU: notes what is launched on it, parameters as the bytes that they are."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAME = "libcuda.so.1"
# Of a thread that has one.
CONTEXT, FUNCTION = 0xC0, 0xF0

NEEDS_A_COMPILER = pytest.mark.skipif(
    not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")), reason="takes a C compiler"
)

_SOURCE = Path(__file__).with_suffix(".c")


def build(folder: Path) -> Path:
    """Compile it into a folder."""
    library = folder / NAME
    compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{NAME}", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True)
    return library


@dataclass(frozen=True)
class Launched:
    """What reached the driver of a launch; of parameters their bytes, as numbers."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    function: int
    attributes: tuple[tuple[int, int], ...]
    parameters: tuple[int, ...]


class Driver:
    """A driver that was built, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)

    def expect(self, sizes: Sequence[int]) -> None:
        """Say how many bytes each parameter of the launches to come has."""
        self._numbers(ctypes.c_int, "sizes", 128)[: len(sizes)] = [*sizes]
        self.set("count", len(sizes))

    def set(self, name: str, value: int) -> None:
        """Change a number: `status` is what launches return, `context` a thread's, `retained` the device asked for."""
        (ctypes.c_uint64 if name == "context" else ctypes.c_int).in_dll(self._library, name).value = value

    def get(self, name: str) -> int:
        """A number: of `launches`, or one that was set."""
        return int((ctypes.c_uint64 if name == "context" else ctypes.c_int).in_dll(self._library, name).value)

    def last(self) -> Launched:
        """The last launch."""
        wide = {name: ctypes.c_uint64.in_dll(self._library, name).value for name in ("stream", "function")}
        ids, values = (self._numbers(ctypes.c_uint, name, 4) for name in ("ids", "values"))
        return Launched(
            tuple(self._numbers(ctypes.c_uint, "grid", 3)),
            tuple(self._numbers(ctypes.c_uint, "block", 3)),
            self.get("shared"),
            **wide,
            attributes=tuple(zip(ids, values, strict=True))[: self.get("attributes")],
            parameters=tuple(self._numbers(ctypes.c_uint64, "parameters", 128))[: self.get("count")],
        )

    def _numbers(self, kind: Any, name: str, count: int) -> Any:
        return (kind * count).in_dll(self._library, name)

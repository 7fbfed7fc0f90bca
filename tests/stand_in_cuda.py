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

_TEXT = """
#include <stdint.h>
#include <string.h>

typedef struct { unsigned grid[3], block[3], shared; void *stream; struct Attribute *attrs; unsigned count; } Config;
struct Attribute { int id; char pad[4]; char value[64]; };

int launches, status, sizes[128], count;
unsigned grid[3], block[3], shared, attributes, ids[4], values[4];
uint64_t stream, function, parameters[128], context = 0xC0;
int retained = -1;

int cuLaunchKernelEx(const Config *config, void *kernel, void **given, void **extra) {
  memcpy(grid, config->grid, sizeof grid);
  memcpy(block, config->block, sizeof block);
  shared = config->shared;
  stream = (uint64_t)config->stream;
  function = (uint64_t)kernel;
  attributes = config->count;
  for (unsigned at = 0; at < attributes; ++at) {
    ids[at] = config->attrs[at].id;
    memcpy(&values[at], config->attrs[at].value, 4);
  }
  memset(parameters, 0, sizeof parameters);
  for (int at = 0; at < count; ++at)
    memcpy(&parameters[at], given[at], sizes[at]);
  ++launches;
  return status;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == 701 ? "too many resources requested for launch" : 0;
  return *text ? 0 : 1;
}
int cuCtxGetCurrent(uint64_t *found) { *found = context; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(uint64_t *found, int device) { retained = device; *found = 0xC0; return 0; }
int cuCtxSetCurrent(uint64_t entered) { context = entered; return 0; }

int cuDeviceGetAttribute(int *value, int which, int device) { *value = 232448; return 0; }
int cuModuleLoadData(uint64_t *module, const void *image) { *module = 1; return 0; }
int cuModuleGetFunction(uint64_t *found, uint64_t module, const char *name) { *found = 0xF0; return 0; }
int cuFuncGetAttribute(int *value, int which, uint64_t kernel) { *value = 1024; return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuFuncSetCacheConfig(void) { return 0; }
int cuPointerGetAttribute(void) { return 0; }
int cuCtxGetLimit(void) { return 0; }
int cuCtxSetLimit(void) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuOccupancyMaxActiveClusters(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
"""


def build(folder: Path) -> Path:
    """Compile it into a folder."""
    source, library = folder / "cuda.c", folder / NAME
    source.write_text(_TEXT)
    compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{NAME}", "-o", str(library), str(source)]
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

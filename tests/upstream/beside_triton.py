"""Emitted kernels, launched by Triton's C launcher and by ours on a stand-in for the driver: a line for each.

    LD_LIBRARY_PATH=FOLDER TRITON_LIBCUDA_PATH=FOLDER python -m tests.upstream.beside_triton FOLDER

FOLDER holds what `stand_in_cuda.build` made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

from normforge.ahead_of_time.compile_keys import CompileKey, compile_keys
from normforge.kernels.gpu import named_target
from normforge.kernels.obtain import compile_for
from normforge.upstream import triton_launcher

from .. import stand_in_cuda
from ..stand_in_driver import driving

MODES = ((64, "rms_fwd_bf16"), (4096, "ln_fwd_bf16_addst_mv"), (16384, "ln_bwd_bf16"), (4096, "rms_bwd_bf16_xb_addst"))
GRID = (5, 2, 1)
BYTES = {"i32": 4, "i64": 8, "fp32": 4}


def arguments_of(key: CompileKey) -> tuple[triton_launcher.Arguments, tuple[Any, ...], list[int]]:
    """How a key's launches come by their arguments, the values of one, and how many bytes each parameter has."""
    brought: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    sizes: list[int] = []
    for at, (name, word) in enumerate(key.key.arguments):
        if isinstance(word, tuple):
            fixed[name] = tuple(range(100, 100 + len(word)))
            sizes += [BYTES[each] for each in word if each != "constexpr"]
        elif isinstance(word, str):
            pointer = word.startswith("*")
            value: Any = 0x7F00_0000_0000 + 16 * at if pointer else 0.1 if word == "fp32" else 1000 + at
            (fixed if name.endswith("_stride") else brought)[name] = value
            sizes.append(8 if pointer else BYTES[word])
        elif word is None:
            brought[name] = 0
        else:
            fixed[name] = word
    names = (*brought, *fixed)
    arrange = itemgetter(*[names.index(name) for name, _ in key.key.arguments])
    told = triton_launcher.Arguments(arrange, len(brought), tuple(fixed.values()), 0)
    return told, tuple(brought.values()), [*sizes, 8, 8]


def launches(key: CompileKey, arguments: triton_launcher.Arguments) -> Iterator[triton_launcher.Launch]:
    """By Triton's launcher, and by ours."""
    compiled = compile_for(key.key, key.function, named_target("sm_90"))
    for native in "01":
        os.environ["NORMFORGE_NATIVE_LAUNCHER"] = native
        launch = triton_launcher.bind(compiled, arguments)
        assert launch is not None
        assert (type(launch).__module__ == "normforge_launcher") == (native == "1")
        yield launch


def main(folder: str) -> None:
    """Compare the launches of each kernel."""
    driver = stand_in_cuda.Driver(Path(folder) / stand_in_cuda.NAME)
    triton_launcher.current_stream = lambda device: 0x1234 + device
    with driving() as triton_driver:
        triton_driver.utils = CudaUtils()
        triton_driver.launcher_cls = CudaLauncher  # type: ignore[method-assign] # the one that is stood in for
        for n, mode in MODES:
            for key in compile_keys([n], [mode], arch="sm_90"):
                arguments, values, sizes = arguments_of(key)
                driver.expect(sizes)
                seen = []
                for launch in launches(key, arguments):
                    launch(GRID, values)
                    seen.append(driver.last())
                verdict = "the same" if seen[0] == seen[1] else f"{seen[0]} and {seen[1]}"
                about = f"{key.key.symbol} {len(sizes)} parameters {seen[0].attributes}"
                print(about, verdict)


if __name__ == "__main__":
    main(sys.argv[1])

"""`normforge aot`: compile what a deployment touches for an architecture, into a folder, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..ahead_of_time.build import build
from ..errors import AotError, ConflictError
from ..kernels.gpu import interpreting, named_target
from .aot_options import parse
from .asked_keys import keys_for


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge aot`; returns 0.

    Raises:
        NormforgeError: see `build`; also for what the arguments name and is not there.
    """
    given = parse(argv, prog)
    if interpreting():
        raise AotError("TRITON_INTERPRET=1 has kernels interpreted, and nothing can be compiled; unset it")
    for_jax = given.framework == "jax"
    targets = [replace(named_target(arch, given.multiprocessors), plainly=for_jax) for arch in given.arch]
    for target in targets:
        if for_jax and not target.is_nvidia:
            raise ConflictError(f"--for jax launches PTX, and {target.arch} runs none; name NVIDIA's: --arch sm_90")
    for target in targets:
        keys = keys_for(given, target)
        out: Path = given.out / target.arch if len(targets) > 1 else given.out
        built = build(keys, target, out.expanduser().resolve(), jobs=given.jobs, progress=True, ptx=for_jax)
        print(
            f"{len(keys)} kernels for {target.arch} in {out}: {built.compiled} compiled, {built.kept} unchanged, "
            f"{built.removed} removed"
        )
    return 0

"""`normforge aot`: compile what a deployment touches for an architecture, into a folder, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..ahead_of_time.build import build
from ..codegen.command import Parser
from ..errors import AotError, ConflictError
from ..kernels.gpu import ARCHITECTURES, interpreting, named_target
from .compile_options import add_key_arguments, keys_for, parse_keys

_DESCRIPTION = """\
Compile everything that calls of some modes and sizes come to into a folder; no GPU is needed.

A process loads it with normforge.load_aot("DIR") or NORMFORGE_AOT=DIR, under the same release of Triton, and launches
its kernels without Triton's compiler. What the folder lacks is compiled then, or refused under NORMFORGE_FROZEN=1.
Afterwards it holds exactly what this command asked for; what it held already is not compiled again.
"""

_EPILOG = """\
examples:
  {prog} --arch sm_90 --n 4096,8192 --out kernels_sm90
  {prog} --arch sm_90 --arch gfx942 --recorded needed.yaml --out kernels
  {prog} --arch gfx942 --n 5120 --manifest needed.yaml --out kernels_gfx942
  {prog} --arch sm_90 --shape '*x320x64x64/32' --out kernels_unet 'gn_*wd_bf16_silu'
  {prog} --for jax --arch sm_90 --n 4096 --out kernels_jax 'ln_*wd_bf16*'
"""


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge aot`; returns 0.

    Raises:
        NormforgeError: see `build`; also for what the arguments name and is not there.
    """
    parser = Parser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    add_key_arguments(parser)
    parser.add_argument(
        "--arch",
        required=True,
        action="append",
        metavar="ARCH",
        help=f"what to compile for: {', '.join(ARCHITECTURES)} and others; may be given several times",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="the folder; of several --arch each has its own in it"
    )
    parser.add_argument(
        "--multiprocessors",
        type=int,
        metavar="COUNT",
        help="of the GPU, if not the usual: tiles whose programs wait for one another are chosen by it",
    )
    parser.add_argument(
        "--for",
        dest="framework",
        choices=("torch", "jax"),
        default="torch",
        help="what launches the kernels; for jax they wait for no other kernel, and their PTX is kept beside the "
        "binaries (default: torch)",
    )
    given = parse_keys(parser, argv)
    if interpreting():
        raise AotError("TRITON_INTERPRET=1 has kernels interpreted, and nothing can be compiled; unset it")
    architectures = tuple(dict.fromkeys(given.arch))
    if len(architectures) > 1 and given.multiprocessors is not None:
        parser.error("--multiprocessors is of one GPU, and --arch names several; compile for them one by one")
    for_jax = given.framework == "jax"
    targets = [replace(named_target(arch, given.multiprocessors), plainly=for_jax) for arch in architectures]
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

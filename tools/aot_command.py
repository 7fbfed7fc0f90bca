"""`normforge aot`: compile what a deployment touches for an architecture, into a folder, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..ahead_of_time.build import build
from ..codegen.command import Parser
from ..errors import AotError
from ..kernels.gpu import ARCHITECTURES, interpreting, named_target
from .compile_options import add_key_arguments, keys_for

_DESCRIPTION = """\
Compile everything that calls of some modes and row lengths come to into a folder; no GPU is needed.

A process loads it with normforge.load_aot("DIR") or NORMFORGE_AOT=DIR, under the same release of Triton, and launches
its kernels without Triton's compiler. What the folder lacks is compiled then, or refused under NORMFORGE_FROZEN=1.
Afterwards it holds exactly what this command asked for; what it held already is not compiled again.
"""

_EPILOG = """\
examples:
  {prog} --arch sm_90 --n 4096,8192 --out kernels_sm90
  {prog} --arch gfx942 --n 5120 --manifest needed.yaml --out kernels_gfx942
"""


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge aot`; returns 0.

    Raises:
        NormforgeError: see `build`; also for what the arguments name and is not there.
    """
    parser = Parser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    add_key_arguments(parser)
    parser.add_argument(
        "--arch", required=True, metavar="ARCH", help=f"what to compile for: {', '.join(ARCHITECTURES)} and others"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder")
    parser.add_argument(
        "--multiprocessors",
        type=int,
        metavar="COUNT",
        help="of the GPU, if not the usual: tiles whose programs wait for one another are chosen by it",
    )
    given = parser.parse_args(argv)
    if interpreting():
        raise AotError("TRITON_INTERPRET=1 has kernels interpreted, and nothing can be compiled; unset it")
    target = named_target(given.arch, given.multiprocessors)
    keys = keys_for(parser, given, target)
    built = build(keys, target, given.out.expanduser().resolve(), jobs=given.jobs, progress=True)
    print(
        f"{len(keys)} kernels for {target.arch} in {given.out}: {built.compiled} compiled, {built.kept} unchanged, "
        f"{built.removed} removed"
    )
    return 0

"""What `normforge aot` is asked for, read without torch: its help and its refusals take no seconds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..codegen.command import Parser
from ..kernels.gpu import ARCHITECTURES
from .compile_options import add_key_arguments, parse_keys

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


def parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Read what follows the verb.

    Raises:
        SystemExit: --help was asked for, or the arguments are no command; argparse has said so.
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
    given.arch = tuple(dict.fromkeys(given.arch))
    if len(given.arch) > 1 and given.multiprocessors is not None:
        parser.error("--multiprocessors is of one GPU, and --arch names several; compile for them one by one")
    return given

"""What `normforge warmup` is asked for, read without torch: its help and its refusals take no seconds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..codegen.command import Parser
from .compile_options import add_key_arguments, parse_keys

_DESCRIPTION = """\
Compile everything that calls of some modes and sizes come to, for the GPU that is here.

What is compiled stays in Triton's cache on disk (TRITON_CACHE_DIR), where processes that start later on this machine
find it: they compile nothing, and under NORMFORGE_FROZEN=1 they would refuse to. For another machine, or without a
GPU: normforge aot.
"""

_EPILOG = """\
examples:
  {prog} --n 4096,8192
  {prog} --n 4096 --weight fp32 'rms_fwd_bf16*' 'rms_bwd_bf16*'
  {prog} --recorded needed.yaml
  {prog} --manifest needed.yaml --instances my_kernels --n 5120
  {prog} --list --arch sm_90 --n 4096 ln_fwd_bf16
  {prog} --shape 2x320x64x64/32,2x640x32x32/32 gn_fwd_bf16_silu_cl
"""


def parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    """Read what follows the verb.

    Raises:
        SystemExit: --help was asked for, or the arguments are no command; argparse has said so.
    """
    parser = Parser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    add_key_arguments(parser)
    parser.add_argument("--list", action="store_true", help="print the compilations, and compile nothing")
    parser.add_argument("--arch", metavar="ARCH", help="with --list: those of this architecture, sm_90 say")
    given = parse_keys(parser, argv)
    if given.arch is not None and not given.list:
        parser.error(f"--arch {given.arch} goes with --list; to compile for a GPU that is not here: normforge aot")
    return given

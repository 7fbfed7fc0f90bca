"""`normforge warmup`: compile what a deployment touches for the GPU that is here, or list it."""

from __future__ import annotations

from collections.abc import Sequence

from ..ahead_of_time.compile_keys import find_target, gpu
from ..ahead_of_time.warmup import load
from ..codegen.command import Parser
from .compile_options import add_key_arguments, keys_for, parse_keys, table_of

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


def main(argv: Sequence[str], prog: str) -> int:
    """Run `normforge warmup`; returns 0.

    Raises:
        NormforgeError: see `warmup`; also for what the arguments name and is not there.
    """
    parser = Parser(prog, _DESCRIPTION, _EPILOG.format(prog=prog))
    add_key_arguments(parser)
    parser.add_argument("--list", action="store_true", help="print the compilations, and compile nothing")
    parser.add_argument("--arch", metavar="ARCH", help="with --list: those of this architecture, sm_90 say")
    given = parse_keys(parser, argv)
    if given.arch is not None and not given.list:
        parser.error(f"--arch {given.arch} goes with --list; to compile for a GPU that is not here: normforge aot")
    keys = keys_for(given, find_target(given.arch))
    if given.list:
        print(table_of(keys))
        return 0
    load(keys, gpu(None), jobs=given.jobs, progress=True)
    print(f"{len(keys)} kernels are compiled")
    return 0

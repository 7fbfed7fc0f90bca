"""The arguments of the verbs, but for `run`, `tune` and `generate`, which have many.

Imports no torch, so that help and refusals take no seconds.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ahead_of_time.modes_and_sizes import ROW_ARGUMENTS, GroupShape, pairs_of, pairs_served
from ..call_kinds import ROWS, USUAL_ROWS
from ..codegen.axes import SAME
from ..codegen.command import Parser, options_given
from ..codegen.instance import ANY
from ..codegen.manifest import load
from ..codegen.model import Mode
from ..codegen.tile_tables import is_architecture
from ..codegen.values import INPUT_DTYPES
from ..errors import AotError, ConflictError, MissingInstanceError
from ..kernels.binaries import INDEX, read
from ..kernels.gpu import ARCHITECTURES, Target, interpreting, named_target
from ..selection import dispatch
from ..selection.recording import recordings

if TYPE_CHECKING:
    from ..ahead_of_time.modes_and_sizes import Pair
    from ..ahead_of_time.stand_ins import Asked, Steps

ABSENT = "none"

_KINDS = (SAME, *(dtype.value for dtype in INPUT_DTYPES), ABSENT)

# The shells that shtab writes completions for and that `normforge completion` is tried in.
SHELLS = ("bash", "zsh", "tcsh")

_WARMUP = """\
Compile every kernel that calls of some modes and sizes take, for this machine's GPU.

The kernels stay in Triton's cache on disk (TRITON_CACHE_DIR). Processes that start later on this machine load them
from the cache and compile nothing; under NORMFORGE_FROZEN=1, compiling is an error. For another machine, or without a
GPU: normforge aot.
"""

_WARMUP_EXAMPLES = """\
examples:
  {prog} --n 4096,8192
  {prog} --n 4096 --weight fp32 'rms_fwd_bf16*' 'rms_bwd_bf16*'
  {prog} --recorded needed.yaml
  {prog} --manifest needed.yaml --instances my_kernels --n 5120
  {prog} --list --arch sm_90 --n 4096 ln_fwd_bf16
  {prog} --shape 2x320x64x64/32,2x640x32x32/32 gn_fwd_bf16_silu_cl
"""

_AOT = """\
Compile every kernel that calls of some modes and sizes take, into a folder. No GPU is needed.

A process loads the folder with normforge.load_aot("DIR") or NORMFORGE_AOT=DIR, under the same release of Triton, and
launches the kernels without Triton's compiler. A kernel that the folder lacks is compiled at its first call, or refused
under NORMFORGE_FROZEN=1. The command keeps kernels that the folder has, and removes those that it does not ask for.
"""

_AOT_EXAMPLES = """\
examples:
  {prog} --arch sm_90 --n 4096,8192 --out kernels_sm90
  {prog} --arch sm_90 --arch gfx942 --recorded needed.yaml --out kernels
  {prog} --arch gfx942 --n 5120 --manifest needed.yaml --out kernels_gfx942
  {prog} --arch sm_90 --shape '*x320x64x64/32' --out kernels_unet 'gn_*wd_bf16_silu'
  {prog} --for jax --arch sm_90 --n 4096 --out kernels_jax 'ln_*wd_bf16*'
"""

_MERGE = """\
Merge recordings, such as those that several processes wrote with NORMFORGE_RECORD=needed.%p.yaml.

The output keeps what it has, so it may be one of the recordings, and repeating the command changes nothing. What
several recordings have is written once.
"""

_MERGE_EXAMPLES = """\
examples:
  {prog} --out needed.yaml needed.*.yaml
"""

_HUB = """\
Write a repository of LayerNorm and RMSNorm layers for Hugging Face's kernels (github.com/huggingface/kernels).

The repository has generated kernels and the code that launches them, and imports torch and Triton only. The library
kernels loads the layers from the folder (LocalLayerRepository), or from the Hub after an upload.
"""

_DOCTOR = """\
Report versions, GPU, tiles, C launcher, cache folders, settings and interpreter, for a user and for a bug report.
Exit status: 0 kernels run here, 1 the report names a problem.
"""

_COMPLETION = """\
Print a script with which a shell completes verbs, options, their values and file names.
"""

_COMPLETION_EXAMPLES = """\
examples:
  eval "$({prog} bash)"          # in ~/.bashrc
  {prog} zsh > ~/.zfunc/_normforge
"""

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def demo(prog: str) -> Parser:
    """Return the parser of `normforge demo`, which takes no options."""
    return Parser(
        prog, "Run ten modes, and print the error of each against the fp64 reference and, on a GPU, time and GB/s."
    )


def doctor(prog: str) -> Parser:
    """Return the parser of `normforge doctor`."""
    parser = Parser(prog, _DOCTOR)
    parser.add_argument("--json", action="store_true", help="print one object of JSON and nothing else")
    return parser


def completion(prog: str) -> Parser:
    """Return the parser of `normforge completion`."""
    parser = Parser(prog, _COMPLETION, _COMPLETION_EXAMPLES.format(prog=prog))
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    return parser


def listing(prog: str) -> Parser:
    """Return the parser of `normforge list`."""
    parser = Parser(
        prog,
        "Print the dispatch table in use: normforge's own, or that of the folder in NORMFORGE_INSTANCES.",
        resolve=_check_architecture,
    )
    parser.add_argument(
        "globs", nargs="*", metavar="GLOB", help="print only instances whose names match one of these patterns"
    )
    parser.add_argument(
        "--arch",
        default=ANY,
        help="print tiles for this architecture, for example sm_90 (default: for those without tiles of their own)",
    )
    return parser


def _check_architecture(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    if args.arch != ANY and not is_architecture(args.arch):
        parser.error(f"--arch {args.arch!r} is no architecture; write one like sm_90 or gfx942, or leave --arch out")
    return args


def merge(prog: str) -> Parser:
    """Return the parser of `normforge merge`."""
    parser = Parser(prog, _MERGE, _MERGE_EXAMPLES.format(prog=prog))
    parser.add_argument(
        "recordings", nargs="+", type=Path, metavar="FILE", help="a recording that NORMFORGE_RECORD wrote"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the recording to write or to extend")
    return parser


def hub(prog: str) -> Parser:
    """Return the parser of `normforge hub`."""
    parser = Parser(prog, _HUB, resolve=_check_owner)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the repository; created if missing")
    parser.add_argument(
        "--owner",
        default="me",
        metavar="NAME",
        help="the user or organisation on the Hub that owns the repository (default: me)",
    )
    return parser


def _check_owner(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    if not _OWNER.fullmatch(args.owner):
        parser.error(f"--owner {args.owner!r} is no name on the Hub: letters, digits, '.', '_' and '-'")
    return _check_folder_argument(parser, args)


def backendbench(prog: str) -> Parser:
    """Return the parser of `normforge backendbench`."""
    parser = Parser(
        prog,
        "Write the folders that BackendBench (github.com/meta-pytorch/BackendBench) loads operators from with "
        "--backend directory: one per operator, with a function that calls normforge.",
        resolve=_check_folder_argument,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder for --ops-directory; created if missing")
    return parser


def warmup(prog: str) -> Parser:
    """Return the parser of `normforge warmup`."""
    parser = Parser(prog, _WARMUP, _WARMUP_EXAMPLES.format(prog=prog), resolve=_check_warmup)
    _add_compilations(parser)
    parser.add_argument("--list", action="store_true", help="print the compilations, and compile nothing")
    parser.add_argument(
        "--arch", metavar="ARCH", help="with --list: the compilations for this architecture, for example sm_90"
    )
    return parser


def _check_warmup(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    _check_compilations(parser, args)
    if args.arch is not None and not args.list:
        parser.error(f"--arch {args.arch} goes with --list; to compile for a GPU that is not here: normforge aot")
    args.target = None if args.arch is None else named_target(args.arch)
    args.pairs = _pairs(args)
    return args


def aot(prog: str) -> Parser:
    """Return the parser of `normforge aot`."""
    parser = Parser(prog, _AOT, _AOT_EXAMPLES.format(prog=prog), resolve=_check_aot)
    _add_compilations(parser)
    parser.add_argument(
        "--arch",
        required=True,
        action="append",
        metavar="ARCH",
        help=f"the architecture to compile for: {', '.join(ARCHITECTURES)} and others; may be given several times",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="the folder to write; with several --arch, each has a folder of its own inside",
    )
    parser.add_argument(
        "--multiprocessors",
        type=int,
        metavar="COUNT",
        help="the number of the GPU's multiprocessors, if unusual; tiles whose programs wait for one another need it",
    )
    parser.add_argument(
        "--for",
        dest="framework",
        choices=("torch", "jax"),
        default="torch",
        help="the framework that launches the kernels; for jax the folder also has PTX, and no kernel waits for "
        "another (default: torch)",
    )
    return parser


def _check_aot(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    _check_compilations(parser, args)
    args.arch = tuple(dict.fromkeys(args.arch))
    if len(args.arch) > 1 and args.multiprocessors is not None:
        parser.error("--multiprocessors is of one GPU, and --arch names several; compile for them one by one")
    for_jax = args.framework == "jax"
    args.targets = [replace(named_target(arch, args.multiprocessors), plainly=for_jax) for arch in args.arch]
    for target in args.targets:
        if for_jax and not target.is_nvidia:
            raise ConflictError(f"--for jax launches PTX, and {target.arch} runs none; name NVIDIA's: --arch sm_90")
    args.pairs = _pairs(args)
    # Triton, whose import takes a while, is asked only if the answer may be yes.
    if "TRITON_INTERPRET" in os.environ and interpreting():
        raise AotError("TRITON_INTERPRET=1 has kernels interpreted, and nothing can be compiled; unset it")
    args.folders = [args.out / target.arch if len(args.targets) > 1 else args.out for target in args.targets]
    for folder, target in zip(args.folders, args.targets, strict=True):
        check_folder(folder.expanduser().resolve(), target)
    return args


def check_folder(out: Path, target: Target) -> None:
    """Make the folder for a target's kernels if it is missing, or refuse it before time is spent on compiling.

    Raises:
        AotError: the folder holds something else, or kernels for another architecture, or cannot be made or written.
    """
    try:
        if (out / INDEX).exists():
            if (old := read(out)).arch != target.arch:
                raise AotError(
                    f"{out} holds kernels for {old.arch} and these are for {target.arch}; name another folder: "
                    "--out DIR"
                )
        elif out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise AotError(
                f"{out} is there already and is no folder of compiled kernels (it holds no {INDEX}); name another, or "
                "an empty one: --out DIR"
            )
        _make(out)
    except OSError as error:
        raise AotError(f"{out} cannot be written ({error.strerror}); name another folder: --out DIR") from error


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _check_folder_argument(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    try:
        _make(args.folder)
    except OSError as error:
        parser.error(f"{args.folder} cannot be written ({error.strerror}); name another DIR")
    return args


def _add_compilations(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name compilations, which `warmup` and `aot` share."""
    parser.add_argument(
        "modes",
        nargs="*",
        metavar="MODE",
        help="names of modes, with which names of instances begin (ln_fwd_bf16), or patterns; default: every mode "
        "that serves N",
    )
    parser.add_argument("--n", type=_lengths, default=(), metavar="N[,N]", help="row lengths")
    parser.add_argument(
        "--shape",
        type=_shapes,
        default=(),
        metavar="SHAPE[,SHAPE]",
        help="for GroupNorm, the shape of x and the groups per sample: 2x320x64x64/32; *x320x64x64/32 for any batch",
    )
    parser.add_argument(
        "--recorded",
        action="append",
        type=Path,
        metavar="FILE",
        help="instead of modes, sizes and properties of calls: a recording that NORMFORGE_RECORD wrote; may be "
        "given several times",
    )
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="take the modes from this manifest")
    parser.add_argument(
        "--instances",
        type=Path,
        metavar="DIR",
        help="the folder of kernels in use at run time (default: NORMFORGE_INSTANCES, or normforge's own)",
    )
    kinds = parser.add_argument_group(
        "properties of calls", f"DTYPE is one of {', '.join(_KINDS)}; {SAME} is the dtype of x"
    )
    present = tuple(word for word in _KINDS if word != ABSENT)
    add: Callable[..., Any] = partial(kinds.add_argument, metavar="DTYPE[,DTYPE]")
    add("--weight", type=partial(_words, _KINDS), default=SAME, help=f"dtypes of weight, or {ABSENT} (default: {SAME})")
    add("--bias", type=partial(_words, _KINDS), help=f"dtypes of bias, or {ABSENT} (default: that of weight)")
    add("--residual", type=partial(_words, present), default=SAME, help=f"dtypes of residual (default: {SAME})")
    add("--smooth", type=partial(_words, present), default="fp32", help="dtypes of smooth_scale (default: fp32)")
    add("--dy", type=partial(_words, present), default=SAME, help=f"dtypes of the incoming gradient (default: {SAME})")
    add("--y", type=partial(_words, present), default=SAME, help=f"dtypes of y of GroupNorm (default: {SAME})")
    kinds.add_argument(
        "--row-stride",
        type=_strides,
        metavar="STRIDES[,STRIDES]",
        help="row strides of x in elements, besides N (contiguous rows); 6144x32x128 is groups of 32 rows, with a "
        "stride of 128 within a group and 6144 between groups; of other tensors by name: x=6144x32x128+out=6144x32x128",
    )
    kinds.add_argument(
        "--rows",
        type=partial(_words, ROWS),
        metavar="CLASS[,CLASS]",
        help=f"classes of the number of rows, or of groups: {', '.join(ROWS)}; the last is more than an i32 counts "
        f"(default: {','.join(USUAL_ROWS)}, or the classes of the recorded calls)",
    )
    parser.add_argument("--jobs", type=_jobs, metavar="J", help="threads that compile (default: one per core, up to 8)")


# Options that go with recorded calls: the places of kernels. Recordings hold the properties of calls.
_BESIDE_RECORDED = {"instances", "rows", "jobs", "arch", "out", "multiprocessors", "framework"}


def _check_compilations(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments, or refuse combinations of them that name no compilations."""
    if args.recorded is not None:
        beside = [f"--{name.replace('_', '-')} is" for name in sorted(options_given(args) - _BESIDE_RECORDED)]
        beside += ["modes are"] if args.modes else []
        if beside:
            parser.error(f"{beside[0]} given beside --recorded, and recordings say what calls bring; leave one out")
        return args
    if args.manifest is not None and args.modes:
        parser.error("modes are named, and --manifest too; leave one of them out")
    if not (args.n or args.shape):
        parser.error(
            "there are no sizes; pass row lengths, --n 4096 say, or --shape 2x320x64x64/32 of GroupNorm, or what was "
            "recorded: --recorded FILE"
        )
    return args


def _pairs(args: argparse.Namespace) -> list[Pair]:
    """Return the modes and sizes that arguments name, none beside recordings; load the table that --instances names.

    Raises:
        NormforgeError: there is no such table, recording, manifest or mode.
    """
    if args.instances is not None:
        dispatch.load_instances(args.instances)
    if args.recorded is not None:
        recordings(args.recorded)
        return []
    if args.manifest is None:
        return pairs_of(args.n, args.modes or None, args.shape)
    return _manifest(args.manifest, args.n, tuple(map(GroupShape.parse, args.shape)))


def _manifest(path: Path, lengths: Sequence[int], shapes: Sequence[GroupShape]) -> list[Pair]:
    instances = load(path).instances
    for n in lengths:
        if not any(n in instance.bucket for instance in instances if isinstance(instance.mode, Mode)):
            raise MissingInstanceError(
                f"no instance of {path} serves N = {n}; leave it out of --n, or add its bucket to the manifest"
            )
    modes = [(instance.mode, instance.bucket.__contains__) for instance in instances]
    return pairs_served(modes, lengths, shapes, str(path))


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 1, separated by commas")
    return tuple(dict.fromkeys(map(int, parts)))


def _shapes(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _strides(text: str) -> tuple[Asked, ...]:
    return tuple(_steps_by_name(part) if "=" in part else _steps(part) for part in text.split(","))


def _steps_by_name(text: str) -> dict[str, Steps]:
    named = [part.partition("=") for part in text.split("+")]
    return {_word(ROW_ARGUMENTS, name.strip()): _steps(steps) for name, _, steps in named}


def _steps(text: str) -> Steps:
    parts = [part.strip() for part in text.split("x")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no stride, or strides with the rows between them: 6144x32x128")
    steps = tuple(map(int, parts))
    return steps if len(steps) > 1 else steps[0]


def _words(known: Sequence[str], text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_word(known, part.strip()) for part in text.split(",")))


def _word(known: Sequence[str], text: str) -> str:
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return text


def _jobs(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; it takes 1 or more")
    return int(text)

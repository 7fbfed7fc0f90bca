"""The arguments of `normforge run`, which are those of ck_tile's layernorm2d example, and what they resolve to."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..call_kinds import LEAST_ROWS_OF_SAMPLE
from ..codegen.command import Parser
from ..codegen.families import Kind
from ..codegen.groups import GROUP
from ..codegen.groups import Activation as GroupActivation
from ..codegen.model import Mode
from ..codegen.parameters import FORWARD, QUANTISED, family_of
from ..codegen.values import (
    FP8_INPUT_DTYPES,
    Columnwise,
    Direction,
    DType,
    DyFormat,
    FusedAdd,
    FusedQuant,
    GateActivation,
    Gating,
    Norm,
)
from . import group_problem, rotary_problem
from .group_problem import GroupProblem, listed, refuse_unread
from .problem import DEFAULT_EPS, Problem, SeveralProblem, Strides
from .rotary_problem import RotaryProblem

AUTO = "auto"

_DESCRIPTION = """\
Run one problem on random tensors, check it against the fp64 reference and time it.
"""

_EPILOG = """\
-m 10 and -m=10 mean the same. GB/s counts every tensor that is read or written once. Without a GPU the kernel runs
once, in Triton's CPU interpreter, and -warmup and -repeat have no effect.
Exit status: 0 done, 1 an output differs from the reference, 2 the request cannot be carried out.
"""

# ck_tile's words and the manifest's; its fp8 is the OCP format on every GPU.
_FLOATS = {dtype.value: dtype for dtype in (DType.FP16, DType.BF16, DType.FP32)}
_INPUTS = _FLOATS | {"fp8": DType.FP8_E4M3FN, **{dtype.value: dtype for dtype in FP8_INPUT_DTYPES}}
_OUTPUTS = _FLOATS | {
    "int8": DType.INT8,
    "fp8": DType.FP8_E4M3FN,
    "fp8_e4m3fn": DType.FP8_E4M3FN,
    "fp8_e4m3fnuz": DType.FP8_E4M3FNUZ,
    "fp8_e5m2": DType.FP8_E5M2,
    "fp4_e2m1fn": DType.FP4_E2M1FN,
}
_FADDS = {mode.code: mode for mode in FusedAdd}
_FQUANTS = {mode.code: mode for mode in FusedQuant}
_NORMS = {norm.value: norm for norm in Norm}
_EPS = {**{norm.value: eps for norm, eps in DEFAULT_EPS.items()}, GROUP: group_problem.DEFAULT_EPS}
_GATINGS = {gating.value: gating for gating in Gating}
_ACTIVATIONS = {activation.value: activation for activation in GateActivation}
# The modes of calls that ck_tile's example has no option for.
_OWN: dict[str, dict[str, Any]] = {
    row.name: {member.value: member for member in row.words}
    for row in FORWARD.parameters
    if row.words is not None and not row.takes_codes
}
# Parameters that only `quantised_layer_norm` has.
_QUANTISED = [row for row in QUANTISED.parameters if row.name not in {other.name for other in FORWARD.parameters}]
_SERVED: dict[str, dict[str, Any]] = {
    row.name: {member.value: member for member in row.words} for row in _QUANTISED if row.words is not None
}
_SERVED_FLAGS = tuple(row.name for row in _QUANTISED if row.kind is Kind.FLAG)
_DY_FORMATS = {dy.value: dy for dy in DyFormat}
_FLAG = {0: False, 1: True}
_STRIDES = {"x": "x_stride", "residual": "xr_stride", "y": "y_stride", "residual_out": "yr_stride"}

# The most norms that one launch takes, and the options that they have.
MOST_NORMS = 4
_OF_SEVERAL = (
    *("several", "m", "norm", "prec_i", "prec_o", "prec_sm", "xbias", "fadd", "fquant", "scale_ub", "cast", "e"),
    *(*_SERVED, *_SERVED_FLAGS, "v", "kname", "warmup", "repeat", "json", "jsonfile"),
)


class Option(NamedTuple):
    """One option: how it is written, its default, which is not shown if it is None, and what it takes."""

    name: str
    type: Callable[[str], Any]
    default: Any
    choices: Sequence[Any] | None
    help: str
    # Another spelling of the option.
    alias: str | None = None
    # The value of an option without one; None if the option needs a value.
    bare: Any = None

    @property
    def spellings(self) -> tuple[str, ...]:
        """How it may be written."""
        return tuple(f"-{name}" for name in (self.name, self.alias) if name)


OPTIONS = (
    Option("m", int, 3328, None, "rows"),
    Option("n", int, 4096, None, "row length"),
    Option(
        "heads",
        int,
        1,
        None,
        "x is (m / heads, heads, n), the front of a packed tensor; strides are then from token to token",
    ),
    Option(
        "stride",
        int,
        -1,
        None,
        "row stride of every tensor, in elements; -1: contiguous rows, heads of x in a packed qkv",
    ),
    Option("x_stride", int, -1, None, "row stride of x; -1: that of -stride"),
    Option("xr_stride", int, -1, None, "row stride of the residual; -1: that of -stride"),
    Option("y_stride", int, -1, None, "row stride of y; -1: that of -stride"),
    Option("yr_stride", int, -1, None, "row stride of the stored sum; -1: that of -stride"),
    Option(
        "e",
        float,
        None,
        None,
        f"epsilon (default: {', '.join(f'{eps:g} with -norm {norm}' for norm, eps in _EPS.items())})",
    ),
    Option("save_mv", int, 0, tuple(_FLAG), "save mean and rstd (rms: rstd)"),
    Option("statistics_only", int, 0, tuple(_FLAG), "with -save_mv 1, write no y"),
    Option("v", int, 1, tuple(_FLAG), "validate against the fp64 reference"),
    Option("kname", int, 1, tuple(_FLAG), "print the names of the instance and the kernel"),
    Option(
        "prec_i",
        str,
        "fp16",
        tuple(_INPUTS),
        "dtype of x, weights and residual; fp8 (fp8_e4m3fn): x has a scale per row, and weights and residual have the "
        "dtype of y, or bf16",
    ),
    Option(
        "prec_o",
        str,
        AUTO,
        (AUTO, *_OUTPUTS),
        "dtype of y; auto: prec_i (fp8: bf16), or int8 if quantised; fp8: fp8_e4m3fn",
    ),
    Option("prec_sm", str, AUTO, (AUTO, *_FLOATS), "dtype of the smooth scale, for -fquant 1; auto: fp32", "prec_sx"),
    Option("prec_sy", str, AUTO, (AUTO, *_FLOATS), "dtype of y's scale, for -fquant 1 and 2; auto: fp32"),
    Option("xbias", int, 0, tuple(_FLAG), "add a bias to x first"),
    Option(
        "dropout",
        float,
        0.0,
        None,
        "with -fadd 1 and 2, the probability that an element of x is dropped before the add",
    ),
    Option(
        "samples",
        int,
        0,
        None,
        f"scale and shift the rows of each of this many samples, with -bwd 1 of {LEAST_ROWS_OF_SAMPLE} rows or more; "
        "0: no modulation",
    ),
    Option("xgate", int, 0, tuple(_FLAG), "with -samples and -fadd 1, gate x by sample before the residual is added"),
    Option("gate", str, "none", tuple(_GATINGS), "multiply rows by an activated gate, after the norm or before"),
    Option(
        "activation",
        str,
        AUTO,
        tuple(dict.fromkeys((AUTO, *(activation.value for activation in GroupActivation), *_ACTIVATIONS))),
        "the activation of the gate, or with -norm group and -dim 1 of y; auto: silu for a gate, none for y",
    ),
    Option(
        "group", int, 0, None, "with -gate, the number of columns that are normalised together, a divisor of n; 0: all"
    ),
    Option(
        "fadd", int, 0, tuple(_FADDS), "0: none, 1: add a residual and store the sum, 2: add one, 3: to y, 4: and norm"
    ),
    Option(
        "fquant",
        int,
        0,
        tuple(_FQUANTS),
        "0: none, 1: smooth dynamic quantisation, 2: dynamic quantisation, 3: by a given scale, 4: by one per column",
    ),
    Option("scale_ub", float, 0.0, None, "with -fquant 1 and 2 to fp8, the upper bound of max|y|; 0: no bound"),
    Option("warmup", int, 5, None, "the number of runs before the timed runs; not milliseconds"),
    Option("repeat", int, 20, None, "the number of timed runs, each with a cold L2 cache; the median is reported"),
    Option(
        "bwd",
        int,
        0,
        tuple(_FLAG),
        "1: time and check the backward pass; with -fadd 1 the sum has a gradient too, with -fquant 2 and -columnwise "
        "dx is quantised along rows and along columns",
    ),
    Option(
        "dy_format",
        str,
        DyFormat.FLOAT.value,
        tuple(_DY_FORMATS),
        "with -bwd 1, the gradient that arrives: x's type, or fp8 with a scale per row or per group",
    ),
    Option("norm", str, "layer", (*_NORMS, GROUP), "which normalisation"),
    Option("dim", int, -1, (-1, 1), "1: normalise the channels of an x of -shape at each position"),
    Option("shape", str, "x".join(map(str, group_problem.SHAPE)), None, "with -norm group and -dim 1, the shape of x"),
    Option(
        "groups",
        int,
        group_problem.GROUPS,
        None,
        "with -norm group, the number of groups per sample, a divisor of the channels",
    ),
    Option(
        "layout",
        str,
        next(iter(group_problem.LAYOUTS)),
        tuple(group_problem.LAYOUTS),
        "with -norm group and -dim 1, the memory format of x",
    ),
    *(
        Option(name, str, next(iter(words)), tuple(words), FORWARD[name].meaning[Norm.LAYER].rstrip("."))
        for name, words in _OWN.items()
    ),
    *(
        Option(name, str, next(iter(words)), tuple(words), QUANTISED[name].meaning[Norm.LAYER].rstrip("."))
        for name, words in _SERVED.items()
    ),
    *(Option(name, int, 0, tuple(_FLAG), QUANTISED[name].meaning[Norm.LAYER].rstrip(".")) for name in _SERVED_FLAGS),
    Option("rope", int, 0, tuple(_FLAG), "1: normalise each head of q and k of m tokens, and rotate pairs of columns"),
    Option("q_heads", int, 32, None, "with -rope 1, heads of q"),
    Option("k_heads", int, 8, None, "with -rope 1, heads of k; 0: q alone"),
    Option("rotary_dim", int, -1, None, "with -rope 1, how many columns of a head are rotated; -1: all"),
    Option("interleaved", int, 0, tuple(_FLAG), "with -rope 1, rotate columns 2 i and 2 i + 1 as a pair"),
    Option("across_heads", int, 0, tuple(_FLAG), "with -rope 1, normalise all heads of a token together"),
    Option("positions", int, 0, tuple(_FLAG), "with -rope 1, a token's row of cos and sin is that of its position"),
    Option(
        "mrope_section",
        str,
        None,
        None,
        "with -rope 1, three positions of each token, and how many pairs turn by each (mRoPE): 16,24,24",
    ),
    Option("mrope_interleaved", int, 0, tuple(_FLAG), "with -mrope_section, pairs take the three positions in turn"),
    Option(
        "key_cache",
        str,
        rotary_problem.NO_CACHE,
        rotary_problem.CACHES,
        "with -rope 1, write keys to a paged cache too; auto: in prec_i, fp8: fp8_e4m3fn",
    ),
    Option("slots", int, 16, None, "with -key_cache, the slots of a block"),
    Option("k_scale", float, 0.0, None, "with -key_cache fp8, what keys are divided by first; 0: by nothing"),
    Option(
        "several", str, None, None, f"the row lengths of 2 to {MOST_NORMS} RMSNorms of m rows in one launch: 1536,512"
    ),
    Option("json", int, 0, tuple(_FLAG), "1, or no value: print one line of JSON and nothing else", bare=1),
    Option("jsonfile", str, None, None, "a file to append the line of JSON to, beside the usual output"),
)


AnyProblem = Problem | GroupProblem | RotaryProblem | SeveralProblem


@dataclass(frozen=True)
class Request:
    """A resolved command line."""

    problem: AnyProblem
    validate: bool
    print_names: bool
    warmup: int
    repeat: int
    json: bool
    json_file: Path | None


class _Parser(Parser):
    """A parser whose options have one dash, which argparse abbreviates whatever allow_abbrev says."""

    def request(self, argv: Sequence[str]) -> Request:
        """Resolve a command line, or print what is wrong with it and exit with status 2."""
        known = ["-h", "--help", *(spelling for option in OPTIONS for spelling in option.spellings)]
        for word in argv:
            name = word.partition("=")[0]
            if name[:1] == "-" and name[1:2].isalpha() and name not in known:
                near = difflib.get_close_matches(name, known, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"{self.prog} -h lists the options"
                self.error(f"there is no option {name}; {hint}")
        try:
            return _resolve(self.parse_args(argv))
        except ValueError as error:
            self.error(str(error))


def parse(argv: Sequence[str], prog: str) -> Request:
    """Resolve a command line, or print what is wrong with it and exit with status 2."""
    return parser(prog).request(argv)


def parser(prog: str) -> _Parser:
    """Return the parser of `normforge run`."""
    parser = _Parser(prog, _DESCRIPTION, _EPILOG)
    for option in OPTIONS:
        parser.add_argument(
            *option.spellings,
            dest=option.name,
            type=option.type,
            default=option.default,
            nargs=None if option.bare is None else "?",
            const=option.bare,
            choices=option.choices,
            metavar=None if option.choices else option.type.__name__.upper(),
            help=option.help if option.default is None else f"{option.help} (default: {option.default})",
        )
    return parser


def _resolve(args: argparse.Namespace) -> Request:
    _check_sizes(args)
    return Request(
        _asked(args),
        _FLAG[args.v],
        _FLAG[args.kname],
        args.warmup,
        args.repeat,
        _FLAG[args.json],
        None if args.jsonfile is None else _writable(Path(args.jsonfile)),
    )


def _asked(args: argparse.Namespace) -> AnyProblem:
    defaults = {option.name: option.default for option in OPTIONS}
    if args.rope:
        return rotary_problem.rotary_problem(args, defaults, _FLOATS)
    of_heads = {name: defaults[name] for name in rotary_problem.OWN}
    refuse_unread(args, of_heads, (), "only -rope 1 reads it")
    if args.several is not None:
        return _several_problem(args, defaults)
    if args.norm == GROUP or args.dim == 1:
        return group_problem.group_problem(args, defaults, _FLOATS, AUTO)
    of_groups = {name: defaults[name] for name in group_problem.OWN}
    refuse_unread(args, of_groups, (), f"only -norm {GROUP} and -dim 1 read it")
    return _problem(args)


def _several_problem(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SeveralProblem:
    asked = f"-several {args.several}"
    refuse_unread(args, defaults, _OF_SEVERAL, f"-several takes {listed(_OF_SEVERAL)}")
    lengths = args.several.split(",")
    if not 2 <= len(lengths) <= MOST_NORMS or not all(re.fullmatch(r"[1-9]\d{0,8}", each) for each in lengths):
        raise ValueError(f"{asked} will not do; it takes 2 to {MOST_NORMS} row lengths, 1536,512 say")
    for name, fitting, reason in (
        ("norm", (Norm.RMS.value,), "its norms are RMSNorms"),
        ("fadd", (0, FusedAdd.PRE_ADD_STORE.code), "a sum is stored"),
        ("prec_i", tuple(_FLOATS), "its norms take no scale of x"),
        ("prec_o", (*_OUTPUTS, AUTO) if args.fquant else (AUTO,), "y has the dtype of x unless it is quantised"),
    ):
        word = getattr(args, name)
        if word not in fitting:
            raise ValueError(f"-{name} {word} does not go with {asked}: {reason}; pass {fitting[-1]}")
    alone = vars(args) | {"several": None}
    return SeveralProblem(tuple(_problem(argparse.Namespace(**alone | {"n": int(n)})) for n in lengths))


def _problem(args: argparse.Namespace) -> Problem:
    fadd, fquant = _FADDS[args.fadd], _FQUANTS[args.fquant]
    _check_used("prec_sm", args.prec_sm, AUTO, fquant.smooths, "only -fquant 1 reads a smooth scale")
    _check_used("prec_sy", args.prec_sy, AUTO, fquant.measures, "only -fquant 1 and 2 write a scale")
    _check_layout(args)
    _check_used("xr_stride", args.xr_stride, -1, fadd.adds, "only -fadd 1 to 4 read a residual")
    _check_used("yr_stride", args.yr_stride, -1, fadd.stores, "only -fadd 1 and 4 store the sum")
    _check_backward(args)
    _check_samples(args)
    _check_gate(args)
    prec_i = _INPUTS[args.prec_i]
    mode = Mode(
        _NORMS[args.norm],
        prec_i,
        _output(args.prec_o, prec_i, fquant),
        fadd=fadd,
        fquant=fquant,
        x_bias=_FLAG[args.xbias],
        save_mv=_FLAG[args.save_mv],
        statistics_only=_FLAG[args.statistics_only],
        modulated=args.samples > 0,
        x_gate=_FLAG[args.xgate],
        gating=_GATINGS[args.gate],
        gate_activation=_gate_activation(args.activation),
        grouped=args.group > 0,
        dropout=args.dropout > 0.0,
        scale_dtype=DType.FP32 if args.prec_sy == AUTO else _FLOATS[args.prec_sy],
        scale_ub=args.scale_ub > 0.0,
        **{name: words[getattr(args, name)] for name, words in _OWN.items()},
        **_served(args),
    )
    if args.bwd and mode.columnwise.writes:
        # Refuses what goes with columns forward alone.
        replace(mode, direction=Direction.BACKWARD)
    if family_of(mode) is QUANTISED:
        _check_beside(args, f"norms of {QUANTISED.functions[mode.norm]}")
    usual = Strides.usual(args.n, args.heads)
    return Problem(
        args.m,
        args.n,
        mode,
        backward=_FLAG[args.bwd],
        prec_sm=DType.FP32 if args.prec_sm == AUTO else _FLOATS[args.prec_sm],
        eps=args.e,
        strides=Strides(**{name: _stride(args, option, getattr(usual, name)) for name, option in _STRIDES.items()}),
        heads=args.heads,
        samples=args.samples,
        group=args.group,
        dropout_p=args.dropout,
        scale_layout=_SERVED["scale_layout"][args.scale_layout],
        scale_ub=args.scale_ub,
        dy_format=_DY_FORMATS[args.dy_format],
    )


def _served(args: argparse.Namespace) -> dict[str, Any]:
    """Return the axes that only `quantised_layer_norm` has."""
    words = {name: words[getattr(args, name)] for name, words in _SERVED.items()}
    words["scale_layout"] = words["scale_layout"].of_kernels
    return words | {name: _FLAG[getattr(args, name)] for name in _SERVED_FLAGS}


def _gate_activation(word: str) -> GateActivation:
    if word == AUTO:
        return GateActivation.SILU
    if word not in _ACTIVATIONS:
        raise ValueError(f"-activation {word} is none of a gate; pass one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[word]


def _writable(path: Path) -> Path:
    """Return the path of a file that can be appended to, or refuse the path before time is spent on the run."""
    at = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(at, os.W_OK):
        raise ValueError(f"-jsonfile {path} cannot be written; name a file in a folder that is there")
    return path


def _check_sizes(args: argparse.Namespace) -> None:
    for name, least in (("m", 1), ("n", 1), ("heads", 1), ("warmup", 0), ("repeat", 1), ("e", 0.0)):
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            raise ValueError(f"-{name} {value} will not do; it takes a finite number of at least {least:g}")
    row = FORWARD["dropout_p"]
    if not row.least <= args.dropout <= row.most:
        raise ValueError(f"-dropout {args.dropout} will not do; it takes a number from 0 to below 1")
    if args.m % args.heads:
        raise ValueError(
            f"-m {args.m} rows are no whole number of tokens with -heads {args.heads} each; "
            f"pass a multiple, {args.m + -args.m % args.heads} say"
        )


def _check_layout(args: argparse.Namespace) -> None:
    unset, in_groups = next(iter(_SERVED["scale_layout"])), args.group_size != next(iter(_SERVED["group_size"]))
    _check_used("scale_layout", args.scale_layout, unset, in_groups, "only scales of -group_size lie in an order")
    if not 0.0 <= args.scale_ub < float("inf"):
        raise ValueError(f"-scale_ub {args.scale_ub} will not do; it takes a finite number above 0, or 0 for no bound")


def _check_samples(args: argparse.Namespace) -> None:
    if not args.samples:
        _check_used("xgate", args.xgate, 0, False, "only rows of -samples are gated")
        return
    if args.samples < 0 or args.m % args.samples:
        raise ValueError(f"-m {args.m} rows are no whole number of rows a sample with -samples {args.samples}")
    _check_beside(
        args,
        f"-samples {args.samples}",
        ("heads", 1, "samples are of rows that adjoin"),
    )


def _check_gate(args: argparse.Namespace) -> None:
    gates = _GATINGS[args.gate].gates
    _check_used("activation", args.activation, AUTO, gates, f"only a -gate and -norm {GROUP} are activated")
    _check_used("group", args.group, 0, gates, "only rows with a -gate are in groups")
    if args.group < 0 or (args.group and args.n % args.group):
        raise ValueError(f"-group {args.group} does not divide -n {args.n}")
    if gates:
        with_heads = [("heads", 1, "groups are of rows of one stride")] if args.group else []
        _check_beside(
            args,
            f"-gate {args.gate}",
            ("samples", 0, "a norm has one neighbour"),
            *with_heads,
        )


def _check_beside(args: argparse.Namespace, option: str, *own: tuple[str, int, str]) -> None:
    """Refuse options that gated and modulated norms lack, given the value that leaves each unused, and the reason."""
    places = [(name, -1, "they write where they allocate") for name in ("y_stride", "yr_stride")]
    for name, unset, reason in (*own, *places):
        value = getattr(args, name)
        if value != unset:
            raise ValueError(f"-{name} {value} does not go with {option}: {reason}")


def _check_backward(args: argparse.Namespace) -> None:
    takes_fp8 = args.bwd and not (args.samples or args.dropout or _GATINGS[args.gate].gates)
    reason = "only -bwd 1 without -samples, -gate and -dropout takes a dy with scales"
    _check_used("dy_format", args.dy_format, DyFormat.FLOAT.value, takes_fp8, reason)
    if not args.bwd:
        return
    quantises = args.columnwise != Columnwise.NONE.value
    prec_o = AUTO if quantises else args.prec_o
    for name, value, reason in (
        (
            "fquant",
            0 if quantises else args.fquant,
            "quantised outputs have no gradient; -columnwise quantises dx",
        ),
        ("prec_i", "" if args.prec_i in _FLOATS else args.prec_i, "norms of fp8 have no gradient"),
        ("save_mv", args.save_mv, "mean and rstd are always saved for it"),
        ("fadd", args.fadd if args.fadd == FusedAdd.PRE_ADD.code else 0, "its sum is not stored; use -fadd 1"),
        ("fadd", args.fadd if _FADDS[args.fadd].is_after else 0, "its kernels are those of -fadd 0"),
        ("fadd", args.fadd if _FADDS[args.fadd].renorms else 0, "its kernels are those of -fadd 0 and 1"),
        ("prec_o", 0 if prec_o == AUTO else prec_o, "gradients are of the types of what they belong to"),
    ):
        if value:
            raise ValueError(f"-{name} {value} does not go with -bwd 1: {reason}")


def _check_used(name: str, value: Any, unset: Any, used: bool, reason: str) -> None:
    if value != unset and not used:
        raise ValueError(f"-{name} {value} would be ignored: {reason}; leave it out or set that mode")


def _output(word: str, prec_i: DType, fquant: FusedQuant) -> DType:
    if word == AUTO:
        return DType.INT8 if fquant.quantises else DType.BF16 if prec_i.is_fp8 else prec_i
    dtype = _OUTPUTS[word]
    if dtype.is_quantised != fquant.quantises:
        fits = [name for name, other in _OUTPUTS.items() if other.is_quantised == fquant.quantises]
        other = "0" if fquant.quantises else "1 or -fquant 2"
        raise ValueError(
            f"-prec_o {word} does not go with -fquant {fquant.code}; pass one of {', '.join(fits)}, or -fquant {other}"
        )
    return dtype


def _stride(args: argparse.Namespace, name: str, usual: int) -> int:
    own = getattr(args, name)
    option, stride = ("stride", args.stride) if own == -1 else (name, own)
    if stride == -1:
        return usual
    least = args.heads * args.n
    if stride < least:
        row = f"a row (-n {args.n})" if args.heads == 1 else f"a token's rows (-heads {args.heads} of -n {args.n})"
        raise ValueError(
            f"-{option} {stride} is shorter than {row}, so rows would overlap; pass at least {least}, or -1"
        )
    return int(stride)

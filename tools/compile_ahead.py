"""`normforge warmup` and `normforge aot`: compile what a deployment touches before it is needed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ..ahead_of_time import warmup as ahead
from ..ahead_of_time.compile_keys import (
    CompileKey,
    find_target,
    gpu,
    keys_of,
    recorded_keys_for,
)
from ..ahead_of_time.stand_ins import Deployment, Kind
from ..ahead_of_time.warmup import build
from ..call_kinds import USUAL_ROWS
from ..codegen.axes import SAME
from ..codegen.values import DType
from ..dtypes import TORCH_DTYPES
from ..kernels.gpu import KernelKey, Target
from ..kernels.strides import strides_told
from .arguments import ABSENT


def warmup(args: argparse.Namespace) -> int:
    """Compile for the GPU that is here, or list the compilations; returns 0.

    Raises:
        NormforgeError: see `normforge.warmup`; also for what the arguments name and is not there.
    """
    keys = _keys(args, args.target or find_target(None))
    if args.list:
        print(_table(keys))
        return 0
    ahead.load(keys, gpu(None), jobs=args.jobs, progress=True)
    print(f"{len(keys)} kernels are compiled")
    return 0


def aot(args: argparse.Namespace) -> int:
    """Compile for named architectures into a folder, without a GPU; returns 0.

    Raises:
        NormforgeError: see `build`; also for what the arguments name and is not there.
    """
    for target, folder in zip(args.targets, args.folders, strict=True):
        keys = _keys(args, target)
        out, ptx = folder.expanduser().resolve(), args.framework == "jax"
        built = build(keys, target, out, jobs=args.jobs, progress=True, ptx=ptx)
        print(
            f"{len(keys)} kernels for {target.arch} in {folder}: {built.compiled} compiled, {built.kept} unchanged, "
            f"{built.removed} removed"
        )
    return 0


def _keys(args: argparse.Namespace, target: Target) -> list[CompileKey]:
    """Return the compilations that parsed arguments ask for.

    Raises:
        NormforgeError: a recording cannot be read, or the arguments are not those of any call.
    """
    if args.recorded is not None:
        return recorded_keys_for(args.recorded, target, args.rows)
    deployment = Deployment(
        weight_dtypes=_kinds(args.weight),
        bias_dtypes=None if args.bias is None else _kinds(args.bias),
        residual_dtypes=_kinds(args.residual),
        smooth_dtypes=_kinds(args.smooth),
        dy_dtypes=_kinds(args.dy),
        row_strides=(None, *(args.row_stride or ())),
        rows=args.rows or USUAL_ROWS,
        y_dtypes=_kinds(args.y),
    )
    return keys_of(args.pairs, target, deployment)


def _kinds(words: Iterable[str]) -> tuple[Kind, ...]:
    absent: dict[str, Kind] = {ABSENT: None, SAME: SAME}
    return tuple(absent[word] if word in absent else TORCH_DTYPES[DType(word)] for word in words)


def _table(keys: Sequence[CompileKey]) -> str:
    """Compilations as a table, and how many they are."""
    rows = [
        (*_instances(key), key.n, " and ".join(key.rows), key.key.symbol, _operands(key.key), _constants(key.key))
        for key in keys
    ]
    headers = ["instance", "N", "rows", "kernel", "operands", "constants and options"]
    return f"{tabulate(rows, headers, disable_numparse=True)}\n\n{len(keys)} compilation{'s' * (len(keys) != 1)}"


def _instances(key: CompileKey) -> tuple[str]:
    first, *others = key.instances
    return (f"{first} and {len(others)} more" if others else first,)


def _operands(key: KernelKey) -> str:
    pointers = [(name, kind) for name, kind in key.arguments if name.endswith("_ptr") and isinstance(kind, str)]
    strides = {name: f" on {strides_told(kind)} strides" for name, kind in key.arguments if isinstance(kind, tuple)}
    words = ((name.removesuffix("_ptr"), *kind.removeprefix("*").partition(":")) for name, kind in pointers)
    return ", ".join(
        f"{name} {kind}{'' if aligned else ' unaligned'}{strides.get(f'{name}_row_stride', '')}"
        for name, kind, aligned, _ in words
    )


def _constants(key: KernelKey) -> str:
    constants = [(name, value) for name, value in key.arguments if isinstance(value, int) and name != "N"]
    return " ".join(f"{name}={value}" for name, value in (*constants, *key.options))

"""`normforge warmup` and `normforge aot`: compile what a deployment touches before it is needed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from ..ahead_of_time import warmup as ahead
from ..ahead_of_time.build import build
from ..ahead_of_time.compile_keys import (
    CompileKey,
    Pair,
    find_target,
    gpu,
    keys_of,
    pairs_of,
    pairs_served,
    recorded_keys_for,
)
from ..ahead_of_time.group_shapes import GroupShape
from ..ahead_of_time.stand_ins import Deployment, Kind
from ..call_kinds import USUAL_ROWS
from ..codegen.axes import SAME
from ..codegen.manifest import load
from ..codegen.model import Mode
from ..codegen.values import DType
from ..dtypes import TORCH_DTYPES
from ..errors import AotError, ConflictError, MissingInstanceError
from ..kernels.gpu import Target, interpreting, named_target
from ..kernels.key import KernelKey
from ..kernels.strides import strides_told
from ..selection import dispatch
from .arguments import ABSENT


def warmup(given: argparse.Namespace) -> int:
    """Compile for the GPU that is here, or list the compilations; returns 0.

    Raises:
        NormforgeError: see `normforge.warmup`; also for what the arguments name and is not there.
    """
    keys = _keys(given, find_target(given.arch))
    if given.list:
        print(_table(keys))
        return 0
    ahead.load(keys, gpu(None), jobs=given.jobs, progress=True)
    print(f"{len(keys)} kernels are compiled")
    return 0


def aot(given: argparse.Namespace) -> int:
    """Compile for named architectures into a folder, without a GPU; returns 0.

    Raises:
        NormforgeError: see `build`; also for what the arguments name and is not there.
    """
    if interpreting():
        raise AotError("TRITON_INTERPRET=1 has kernels interpreted, and nothing can be compiled; unset it")
    for_jax = given.framework == "jax"
    targets = [replace(named_target(arch, given.multiprocessors), plainly=for_jax) for arch in given.arch]
    for target in targets:
        if for_jax and not target.is_nvidia:
            raise ConflictError(f"--for jax launches PTX, and {target.arch} runs none; name NVIDIA's: --arch sm_90")
    for target in targets:
        keys = _keys(given, target)
        out: Path = given.out / target.arch if len(targets) > 1 else given.out
        built = build(keys, target, out.expanduser().resolve(), jobs=given.jobs, progress=True, ptx=for_jax)
        print(
            f"{len(keys)} kernels for {target.arch} in {out}: {built.compiled} compiled, {built.kept} unchanged, "
            f"{built.removed} removed"
        )
    return 0


def _keys(given: argparse.Namespace, target: Target) -> list[CompileKey]:
    """The compilations that parsed arguments ask for.

    Raises:
        NormforgeError: there is no such table, manifest or mode.
    """
    if given.instances is not None:
        dispatch.load_instances(given.instances)
    if given.recorded is not None:
        return recorded_keys_for(given.recorded, target, given.rows)
    deployment = Deployment(
        weight_dtypes=_kinds(given.weight),
        bias_dtypes=None if given.bias is None else _kinds(given.bias),
        residual_dtypes=_kinds(given.residual),
        smooth_dtypes=_kinds(given.smooth),
        dy_dtypes=_kinds(given.dy),
        wants=None,
        row_strides=(None, *(given.row_stride or ())),
        misaligned=((),),
        rows=given.rows or USUAL_ROWS,
        y_dtypes=_kinds(given.y),
    )
    if given.manifest is None:
        pairs = pairs_of(given.n, given.modes or None, given.shape)
    else:
        pairs = _manifest(given.manifest, given.n, tuple(map(GroupShape.parse, given.shape)))
    return keys_of(pairs, target, deployment)


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


def _manifest(path: Path, lengths: Sequence[int], shapes: Sequence[GroupShape]) -> list[Pair]:
    instances = load(path).instances
    for n in lengths:
        if not any(n in instance.bucket for instance in instances if isinstance(instance.mode, Mode)):
            raise MissingInstanceError(
                f"no instance of {path} serves N = {n}; leave it out of --n, or add its bucket to the manifest"
            )
    modes = [(instance.mode, instance.bucket.__contains__) for instance in instances]
    return pairs_served(modes, lengths, shapes, str(path))

"""The kernels of an operation on a GPU, each a custom call of the program: for which GPU, from which PTX, launched how.

PTX comes from a folder that was compiled ahead of time, or from Triton, if it is installed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import settings
from ..call_kinds import FEW, ROWS
from ..errors import AotError, CompileError, DeviceError, FrozenError
from ..kernels.assembly import SUMS, Facts, Recipe, assemble, in_software
from ..kernels.binaries import Folder, digest_of, read
from ..kernels.gpu import KernelKey, Target, named_target
from ..kernels.strides import kind_of
from ..locks import fork_safe
from ..selection import dispatch
from ..selection.table import Source, source_of
from ..upstream import jaxlib_triton
from .operation import Operation

_named: ContextVar[Target | None] = ContextVar("normforge_jax_target", default=None)


@contextmanager
def lower_for(arch: str, multiprocessors: int | None = None) -> Iterator[None]:
    """Lower for a named GPU, which this machine need not have, inside a `with` block.

    It goes with `jax.export.export(..., platforms=["cuda"])` and `jax.jit(...).trace(...).lower(lowering_platforms=
    ("cuda",))`. What JAX has lowered before, of the same function and shapes, it may give again.

    Args:
        arch: NVIDIA's, "sm_90" say.
        multiprocessors: how many such a GPU has, if not the usual number.

    Raises:
        TargetError: there is no such architecture.
        DeviceError: it is not NVIDIA's.
    """
    target = named_target(arch, multiprocessors)
    if not target.is_nvidia:
        raise DeviceError(f"arch is {arch!r}, and JAX launches PTX, which it does not run; name an NVIDIA GPU: 'sm_90'")
    before = _named.set(replace(target, plainly=True))
    try:
        yield
    finally:
        _named.reset(before)


def lowered_for() -> Target:
    """Return the GPU to lower for.

    Raises:
        DeviceError: none is here, and none was named.
    """
    return _named.get() or _here()


@cache
def _here() -> Target:
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise DeviceError(
            f"JAX finds no NVIDIA GPU to lower for ({error}); name one: with normforge.jax.lower_for('sm_90')"
        ) from error
    major, minor = str(device.compute_capability).split(".")
    # Some releases do not report the number of multiprocessors; those get the architecture's usual number.
    count = getattr(device, "core_count", None)
    return replace(named_target(f"sm_{major}{minor}", None if count is None else int(count)), plainly=True)


class Code(NamedTuple):
    """A compiled kernel.

    Attributes:
        name: its symbol.
        ptx: what is assembled where it runs.
        warps: warps a program.
        shared: bytes of shared memory.
    """

    name: str
    ptx: str
    warps: int
    shared: int


_lock = fork_safe(threading.RLock())
_folder: Folder | None = None
_codes: dict[tuple[KernelKey, str], Code] = {}


def load_aot(folder: str | os.PathLike[str]) -> None:
    """Take kernels from a folder that `normforge aot --for jax` wrote, instead of compiling them, from now on.

    With all that is called for in it, neither Triton nor torch is imported or has to be installed; what it lacks is
    compiled by Triton, unless NORMFORGE_FROZEN=1 forbids it. PTX is assembled by jaxlib: any release of Triton may have
    compiled it.

    Args:
        folder: the folder. The environment variable NORMFORGE_AOT names one for the whole process.

    Raises:
        AotError: it holds no index that this version reads. Lowering raises it too: for a GPU of another
            architecture, a damaged file, no PTX, and a kernel whose source has changed.
    """
    global _folder
    aot_folder = read(settings.named(folder, AotError))
    with _lock:
        _folder = aot_folder
        _codes.clear()


def code_of(key: KernelKey, source: Source, target: Target) -> Code:
    """Return the compiled kernel of a key.

    Raises:
        AotError: the folder in use does not fit; see `load_aot`.
        FrozenError: it would have to be compiled, and NORMFORGE_FROZEN is 1.
        CompileError: it is in no folder, and Triton is not installed; or it is none that jaxlib can launch.
    """
    global _folder
    with _lock:
        code = _codes.get((key, target.arch))
        if code is None:
            if _folder is None and (path := settings.compiled_ahead()) is not None:
                _folder = read(path)
            held = None if _folder is None else _folder.find_ptx(key, digest_of(source.path), target)
            code = _codes[key, target.arch] = _checked(key, *(held or _compiled(key, source, target)))
        return code


def _compiled(key: KernelKey, source: Source, target: Target) -> tuple[str, Mapping[str, Any]]:
    """Return the PTX of a kernel, compiled by Triton, and Triton's metadata."""
    again = f"compile it ahead of time: normforge aot --for jax --arch {target.arch} --n {key.n} ... --out DIR"
    where = "in no folder" if _folder is None else f"not in {_folder.path}"
    if find_spec("triton") is None:
        raise CompileError(f"{key} is {where}, and Triton, which compiles it, is not installed; install it, or {again}")
    if settings.frozen():
        raise FrozenError(f"NORMFORGE_FROZEN=1 forbids compiling {key}, which is {where}; {again}")
    from ..kernels.obtain import compile_for

    kernel = compile_for(key, source.load(), target)
    return kernel.asm["ptx"], kernel.metadata._asdict()


def _checked(key: KernelKey, ptx: str, metadata: Mapping[str, Any]) -> Code:
    """Return the kernel, or raise CompileError if jaxlib cannot launch the kernel."""
    for name, plain in (
        ("num_ctas", 1),
        ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
        ("launch_cooperative_grid", False),
        ("launch_pdl", False),
    ):
        if (metadata.get(name) or plain) != plain:
            raise CompileError(
                f"{key} was compiled with {name}={metadata[name]}, which jaxlib cannot launch; compile it again with "
                "another release of Triton, which does not ask for it"
            )
    return Code(str(metadata["name"]), ptx, int(metadata["num_warps"]), int(metadata["shared"]))


def launched(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    """Launch the kernels of an operation on one row or more, and return the results.

    Raises:
        DeviceError: no GPU is here, and none was named.
        MissingInstanceError: nothing serves the operation, and nothing may be generated.
        NormforgeError: see `code_of` and `jaxlib_triton.message`.
    """
    *leading, n = shape = operands[op.rows_at].shape
    m, target = prod(leading), lowered_for()
    entry = dispatch.find(op.mode, n)
    size = entry.size(m)
    dtypes = dict.fromkeys([row.name for row in op.family.tensors])
    dtypes |= {name: jnp.dtype(dtype) for name, dtype in (*op.operands, *op.results)}
    # XLA allocates aligned arrays without gaps.
    strided = [row for row in op.family.tensors if row.row_stride_slot is not None]
    strides = {str(row.row_stride_slot): n if dtypes[row.name] else 0 for row in strided}
    dispatch.tell(lambda: kind_of(op.mode.name, {"n": n}, size, dtypes, strides, ()))
    facts = Facts(op.family, op.mode, n, target, dtypes, strides, {}, (), invariant=entry.is_invariant)
    assembly = assemble(facts, entry.choices(m, n, target.arch), m, few=ROWS[size] == FEW)
    programs = assembly.programs(m, 1)
    results = {row.slot: (op.shape_of(row, (m, n)), dtypes[row.name]) for row in op.outputs}
    # y as bytes, where kernels encode fp8 themselves.
    as_bytes = {"y_ptr": (results["y_ptr"][0], "uint8")} if in_software(op.mode.dtype_out, target) else {}
    partials = {f"{name}_ptr": ((programs, n), "float32") for name in SUMS}
    terms = dict.fromkeys(assembly.row_terms, ((m,), "float32"))
    numbers = {"eps": op.eps, "weight_offset": op.weight_offset, "M": m, "programs": programs}
    known = {row.slot: each.reshape(op.shape_of(row, (m, n))) for row, each in zip(op.inputs, operands, strict=True)}

    def launch(recipe: Recipe, makes: Mapping[str, tuple[Sequence[int], Any]]) -> None:
        """Launch a kernel on known arrays, and add the arrays that it writes, made of some shapes and dtypes."""
        source = source_of(entry, recipe.part)
        key = recipe.key(source.name, source.parameters, target)
        code = code_of(key, source, target)
        brought = [(name, word) for name, word in key.arguments if name not in recipe.constants and word is not None]
        pointers = [name for name, word in brought if str(word).startswith("*")]
        reads = [name for name in pointers if name in known]
        writes = pointers[len(reads) :]
        # Arrays of a custom call are its operands, and then its results.
        assert pointers[: len(reads)] == reads, f"{key} reads what lies behind what it writes"
        values: dict[str, Any] = {**numbers, **recipe.strides}
        parameters = [None if name in pointers else (values[name], str(word)) for name, word in brought]
        capability = int(target.arch.removeprefix("sm_"))
        message = jaxlib_triton.message(*code, capability, recipe.grid(m, programs), parameters)
        call = jax.ffi.ffi_call(jaxlib_triton.TARGET, [jax.ShapeDtypeStruct(*makes[name]) for name in writes])
        known.update(zip(writes, call(*[known[name] for name in reads], name=code.name, opaque=message), strict=True))

    for recipe in assembly.walkers:
        launch(recipe, {**results, **as_bytes, **partials, **terms})
    if assembly.finisher is not None:
        known |= {f"{name}_partials_ptr": known.pop(f"{name}_ptr") for name in SUMS if f"{name}_ptr" in known}
        launch(assembly.finisher, results)
    known |= {slot: jax.lax.bitcast_convert_type(known[slot], results[slot][1]) for slot in as_bytes}
    return [known[row.slot].reshape(op.shape_of(row, shape)) for row in op.outputs]

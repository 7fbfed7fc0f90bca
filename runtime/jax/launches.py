"""The kernels of an operation on a GPU, each a custom call of the program: for which GPU, from which PTX, launched how.

PTX comes from a folder that was compiled ahead of time, or from Triton, if it is installed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import settings
from ..call_kinds import MANY, MOST, ROTARY, ROTARY_SIZES, ROWS, CallKind
from ..codegen.groups import GroupMode
from ..codegen.parameters import family_of
from ..codegen.several import suffix
from ..errors import AotError, CompileError, DeviceError, FrozenError
from ..kernels import rotary
from ..kernels.assembly import SUMS, Facts, Recipe, assemble, in_software, join
from ..kernels.binaries import Folder, digest_of, read
from ..kernels.gpu import KernelKey, Target, named_target
from ..kernels.strides import kind_of
from ..locks import fork_safe
from ..selection import dispatch
from ..selection.invariance import is_on
from ..selection.table import Source, source_of
from ..upstream import jaxlib_triton
from .operation import Heads, Operation

# The package of kernels that no table lists.
_GENERATED = "normforge.generated"

# Features in Triton's metadata that jaxlib's launches lack.
_NONE = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")

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
    named = "--recorded FILE" if key.symbol in ROTARY else f"--n {key.n} ..."
    again = f"compile it ahead of time: normforge aot --for jax --arch {target.arch} {named} --out DIR"
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
    for name, plain in {"num_ctas": 1, **dict.fromkeys(_NONE, 0)}.items():
        if (metadata.get(name) or plain) != plain:
            raise CompileError(
                f"{key} was compiled with {name}={metadata[name]}, which jaxlib cannot launch; compile it again with "
                "another release of Triton, which does not ask for it"
            )
    return Code(str(metadata["name"]), ptx, int(metadata["num_warps"]), int(metadata["shared"]))


class Plan(NamedTuple):
    """The kernels of an operation on a GPU.

    Attributes:
        steps: each kernel, in order: its recipe, its source, its grid, and the names of arrays by slots. A slot without
            a name has the array of its own name.
        numbers: what kernels take besides arrays and strides, by slots.
        writes: the shapes and types of arrays that kernels write, where these are not the results'.
        kind: makes the kind of call, which recordings keep.
    """

    steps: Sequence[tuple[Recipe, Source, Sequence[int], Mapping[str, str]]]
    numbers: Mapping[str, float]
    writes: Mapping[str, tuple[Sequence[int], str]]
    kind: Callable[[], CallKind]


def _dtypes(op: Operation) -> dict[str, Any]:
    return {each.name: jnp.dtype(each.dtype) for each in (*op.operands, *op.results)}


def _of_rows(op: Operation, known: Mapping[str, jax.Array], target: Target) -> Plan:
    shape = next(iter(known.values())).shape
    dims = op.operands[0].sizes(shape)
    m, (n,) = prod(dims["..."]), dims["N"]
    # Tables count samples of norms over channels.
    length = prod(shape) // m
    sizes = {"channels": n, "groups": 1, "positions": length // n} if isinstance(op.mode, GroupMode) else {"n": n}
    entry = dispatch.find(op.mode, length)
    facts = Facts(entry, family_of(op.mode), op.mode, length, sizes, target, _dtypes(op), {}, ())
    assembly = assemble(facts, m)
    programs, partials = assembly.programs(m, 1), {f"{name}_ptr": f"{name}_partials" for name in SUMS}
    steps: list[Any] = []
    for recipe in assembly.recipes:
        source = source_of(entry.package, *entry.module_and_symbol(recipe.part))
        steps.append((recipe, source, recipe.grid(m, programs), partials if recipe.part else {}))
    writes: dict[str, tuple[Sequence[int], str]] = dict.fromkeys(partials.values(), ((programs, n), "float32"))
    writes |= {slot.removesuffix("_ptr"): ((assembly.terms(m),), "float32") for slot in assembly.row_terms}
    # Kernels encode y as bytes, where the GPU does not convert to fp8.
    writes |= {"y": (shape, "uint8")} if in_software(op.mode.dtype_out, target) else {}
    numbers = {"M": m, "programs": programs, "eps": op.eps, "weight_offset": op.weight_offset}
    if (rounds := assembly.walkers[0].rounds) is not None:
        # Norms of channels take one round.
        numbers |= zip(("units", "items"), rounds(m)[0][1], strict=True)
    return Plan(steps, numbers, writes, partial(facts.kind, m))


def _of_several(op: Operation, known: Mapping[str, jax.Array], target: Target) -> Plan | None:
    """Return the launch of several norms, or None if each is launched alone."""
    plans = [_of_rows(part, {"x": x}, target) for part, (x, *_) in op.shares(known.values())]
    shared = join([part.mode.name for part in op.parts], [plan.steps[0][0] for plan in plans], invariant=is_on())
    if shared is None:
        return None
    numbers: dict[str, float] = {}
    writes: dict[str, tuple[Sequence[int], str]] = {}
    for at, plan in enumerate(plans):
        own = {**plan.numbers, "programs": plan.steps[0][2][0]}
        numbers |= {f"{name}{suffix(at)}": each for name, each in own.items()}
        writes |= {f"{name}{suffix(at)}": each for name, each in plan.writes.items()}
    grid, kinds = (max(plan.steps[0][2][0] for plan in plans), len(plans), 1), [plan.kind for plan in plans]
    steps = [(shared[1], dispatch.several(shared[0]), grid, dict[str, str]())]
    return Plan(steps, numbers, writes, lambda: replace(kinds[0](), beside=tuple(each() for each in kinds[1:])))


def _of_heads(op: Operation, known: dict[str, jax.Array], target: Target) -> Plan:
    mode, kernel, (*tokens, _, n), width = op.mode, op.mode.name, known["q"].shape, known["cos"].shape[-1]
    heads, m, has_axes = {own: known[own].shape[-2] for own in "qk"}, prod(tokens), mode.height + mode.width > 0
    if has_axes:
        known["positions"] = jnp.moveaxis(known["positions"], -1, 0)
    period = prod(known["positions"].shape[has_axes:] if "positions" in known else known["cos"].shape[:-1])
    flags = mode.interleaved, mode.norm.centres, mode.norm.row.averages, False, width == mode.rotary_dim
    values = n, *heads.values(), mode.rotary_dim, *flags, mode.alternates, mode.height, mode.width, 0
    sizes = dict(zip(ROTARY_SIZES, map(int, values), strict=True))
    strides = {"table_row_stride": width}
    for name in rotary.HEADS[kernel]:
        own = name.removeprefix("d")[0]
        strides |= {f"{name}_token_stride": heads[own] * n, f"{name}_head_stride": n}
    partials = {name: f"{name}_partials" for name in rotary.TOTALS}
    dtypes = {**_dtypes(op), **{partials[name]: jnp.dtype("float32") for name in op.sums}}
    recipes = rotary.assemble(kernel, sizes, dtypes, strides, (), m, target, invariant=is_on())
    size = ROWS.index(MANY if recipes[0][1].types["M"] == "i32" else MOST)
    arrays = dict(zip([f"{name}_ptr" for name in SUMS], partials, strict=False))
    arrays |= dict(zip([f"{name}_partials_ptr" for name in SUMS], partials.values(), strict=False))
    steps = [(recipe, source_of(_GENERATED, *name.split(":")), recipe.grid(m, 1), arrays) for name, recipe in recipes]
    programs, lengths = steps[0][2][0], rotary.weight_lengths(kernel, sizes)
    numbers = {"M": m, "period": period, "programs": programs, "eps": op.eps, "weight_offset": op.weight_offset}
    writes = {partials[name]: ((programs, lengths[name]), "float32") for name in op.sums}
    return Plan(steps, numbers, writes, partial(kind_of, kernel, sizes, size, dtypes, strides, ()))


def launched(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    """Launch the kernels of an operation, none of whose operands is empty, and return the results.

    Raises:
        DeviceError: no GPU is here, and none was named.
        MissingInstanceError: nothing serves the operation, and nothing may be generated.
        NormforgeError: see `code_of` and `jaxlib_triton.message`.
    """
    # XLA allocates aligned arrays without gaps.
    target, known = lowered_for(), dict(zip([each.name for each in op.operands], operands, strict=True))
    sizes = op.sizes([operand.shape for operand in operands])
    planned = _of_several if len(op.parts) > 1 else _of_heads if isinstance(op.mode, Heads) else _of_rows
    plan = planned(op, known, target)
    if plan is None:
        return [each for part, own in op.shares(operands) for each in launched(*own, op=part)]
    dispatch.tell(plan.kind)
    makes = {each.name: (each.shape(sizes), each.dtype) for each in op.results} | dict(plan.writes)
    for recipe, source, grid, arrays in plan.steps:
        key = recipe.key(source.name, source.parameters, target)
        code = code_of(key, source, target)
        brought = [(slot, word) for slot, word in key.arguments if slot not in recipe.constants and word is not None]
        pointers = [slot for slot, word in brought if str(word).startswith("*")]
        names = [arrays.get(slot, slot.replace("_ptr", "")) for slot in pointers]
        reads = [name for name in names if name in known]
        writes = names[len(reads) :]
        # Arrays of a custom call are its operands, and then its results.
        assert names[: len(reads)] == reads, f"{key} reads what lies behind what it writes"
        values: dict[str, Any] = {**plan.numbers, **recipe.strides}
        parameters = [None if slot in pointers else (values[slot], str(word)) for slot, word in brought]
        capability = int(target.arch.removeprefix("sm_"))
        message = jaxlib_triton.message(*code, capability, grid, parameters)
        call = jax.ffi.ffi_call(jaxlib_triton.TARGET, [jax.ShapeDtypeStruct(*makes[name]) for name in writes])
        known.update(zip(writes, call(*[known[name] for name in reads], name=code.name, opaque=message), strict=True))
    made = [(known[each.name], jnp.dtype(each.dtype)) for each in op.results]
    return [jax.lax.bitcast_convert_type(array, own) if array.dtype != own else array for array, own in made]

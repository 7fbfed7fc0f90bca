"""The kernels of an operation on a GPU, each a custom call of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ..call_kinds import FEW, ROWS
from ..kernels.assembly import SUMS, Facts, Recipe, assemble, in_software
from ..kernels.gpu import Target
from ..kernels.strides import kind_of
from ..selection import dispatch
from ..selection.table import Entry, source_of
from ..upstream import jaxlib_triton
from .code import code_of
from .device import target as lowered_for
from .operation import Operation

Arrays = Mapping[str, jax.Array]


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
    launch = partial(_launched, entry, target, numbers)
    known = {row.slot: each.reshape(op.shape_of(row, (m, n))) for row, each in zip(op.inputs, operands, strict=True)}
    for recipe in assembly.walkers:
        known |= launch(recipe, known, {**results, **as_bytes, **partials, **terms})
    if assembly.finisher is not None:
        known |= {f"{name}_partials_ptr": known.pop(f"{name}_ptr") for name in SUMS if f"{name}_ptr" in known}
        known |= launch(assembly.finisher, known, results)
    known |= {slot: jax.lax.bitcast_convert_type(known[slot], results[slot][1]) for slot in as_bytes}
    return [known[row.slot].reshape(op.shape_of(row, shape)) for row in op.outputs]


def _launched(
    entry: Entry,
    target: Target,
    numbers: Mapping[str, float],
    recipe: Recipe,
    known: Arrays,
    makes: Mapping[str, tuple[Sequence[int], Any]],
) -> dict[str, jax.Array]:
    """Launch a kernel and return the arrays that the kernel writes, by slots.

    Args:
        entry: the instance that serves the operation.
        target: the GPU.
        numbers: the numbers that kernels take, by slots.
        recipe: the kernel.
        known: the arrays to read, and others, by slots.
        makes: shapes and dtypes of arrays that kernels may write, by slots.
    """
    source = source_of(entry, recipe.part)
    key = recipe.key(source.name, source.parameters, target)
    code = code_of(key, source, target)
    brought = [(name, word) for name, word in key.arguments if name not in recipe.constants and word is not None]
    pointers = [name for name, word in brought if str(word).startswith("*")]
    reads = [name for name in pointers if name in known]
    writes = pointers[len(reads) :]
    # Arrays of a custom call are its operands, and then its results.
    assert pointers[: len(reads)] == reads, f"{key} reads what lies behind what it writes"
    grid = recipe.grid(int(numbers["M"]), int(numbers["programs"]))
    values: dict[str, Any] = {**numbers, **recipe.strides}
    parameters = [None if name in pointers else (values[name], str(word)) for name, word in brought]
    capability = int(target.arch.removeprefix("sm_"))
    message = jaxlib_triton.message(code.name, code.ptx, code.warps, code.shared, capability, grid, parameters)
    call = jax.ffi.ffi_call(jaxlib_triton.TARGET, [jax.ShapeDtypeStruct(*makes[name]) for name in writes])
    return dict(zip(writes, call(*[known[name] for name in reads], name=code.name, opaque=message), strict=True))

"""The kernels of an operation on a GPU, each a custom call of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

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


def launched(op: Operation, *operands: jax.Array) -> list[jax.Array]:
    """Launch the kernels of an operation on one row or more, and return the results.

    Raises:
        DeviceError: no GPU is here, and none was named.
        MissingInstanceError: nothing serves the operation, and nothing may be generated.
        NormforgeError: see `code_of` and `jaxlib_triton.message`.
    """
    *leading, n = shape = op.shape_in(operands)
    m, target = prod(leading), lowered_for()
    entry = dispatch.find(op.mode, n)
    facts = _facts(op, operands, n, target, invariant=entry.is_invariant)
    size = entry.size(m)
    dispatch.tell(lambda: kind_of(op.mode.name, {"n": n}, size, _dtypes(op, operands), facts.strides, ()))
    assembly = assemble(facts, entry.choices(m, n, target.arch), m, few=ROWS[size] == FEW)
    programs = assembly.programs(m, 1)
    results = {
        row.slot: (op.shape_of(row, (m, n)), jnp.dtype(dtype))
        for row, (_, dtype) in zip(op.outputs, op.results, strict=True)
    }
    # y as bytes, where kernels encode fp8 themselves.
    as_bytes = {"y_ptr": (results["y_ptr"][0], "uint8")} if in_software(op.mode.dtype_out, target) else {}
    partials = {f"{name}_ptr": ((programs, n), "float32") for name in SUMS}
    terms = dict.fromkeys(assembly.row_terms, ((m,), "float32"))
    launch = _Launch(entry, target, m, programs, {"eps": op.eps, "weight_offset": op.weight_offset})
    known = {row.slot: each.reshape(op.shape_of(row, (m, n))) for row, each in zip(op.inputs, operands, strict=True)}
    for recipe in assembly.walkers:
        known |= launch.results(recipe, known, {**results, **as_bytes, **partials, **terms})
    if assembly.finisher is not None:
        known |= {f"{name}_partials_ptr": known.pop(f"{name}_ptr") for name in SUMS if f"{name}_ptr" in known}
        known |= launch.results(assembly.finisher, known, results)
    known |= {slot: jax.lax.bitcast_convert_type(known[slot], results[slot][1]) for slot in as_bytes}
    return [known[row.slot].reshape(op.shape_of(row, shape)) for row in op.outputs]


class _Launch(NamedTuple):
    """The facts that the launches of an operation share, chosen as those of a call from PyTorch are.

    Attributes:
        entry: the instance that serves the operation.
        target: the GPU.
        m: the number of rows.
        programs: the number of programs that share the rows.
        numbers: the numbers that kernels take, by slots.
    """

    entry: Entry
    target: Target
    m: int
    programs: int
    numbers: Mapping[str, float]

    def results(
        self, recipe: Recipe, known: Arrays, makes: Mapping[str, tuple[Sequence[int], Any]]
    ) -> dict[str, jax.Array]:
        """Launch a kernel on the known arrays and return the arrays that the kernel writes, by slots."""
        source = source_of(self.entry, recipe.part)
        key = recipe.key(source.name, source.parameters, self.target)
        code = code_of(key, source, self.target)
        brought = [(name, word) for name, word in key.arguments if name not in recipe.constants and word is not None]
        pointers = [name for name, word in brought if str(word).startswith("*")]
        reads = [name for name in pointers if name in known]
        writes = pointers[len(reads) :]
        # Arrays of a custom call are its operands, and then its results.
        assert pointers[: len(reads)] == reads, f"{key} reads what lies behind what it writes"
        grid = recipe.grid(self.m, self.programs)
        numbers: dict[str, Any] = {**self.numbers, **recipe.strides, "M": self.m, "programs": self.programs}
        parameters = [None if name in pointers else (numbers[name], str(word)) for name, word in brought]
        capability = int(self.target.arch.removeprefix("sm_"))
        message = jaxlib_triton.message(code.name, code.ptx, code.warps, code.shared, capability, grid, parameters)
        call = jax.ffi.ffi_call(jaxlib_triton.TARGET, [jax.ShapeDtypeStruct(*makes[name]) for name in writes])
        return dict(zip(writes, call(*[known[name] for name in reads], name=code.name, opaque=message), strict=True))


def _facts(op: Operation, arrays: Sequence[jax.Array], n: int, target: Target, *, invariant: bool) -> Facts:
    """Return the facts that kernels are chosen by: XLA allocates aligned arrays without gaps."""
    rows, dtypes = op.family.tensors, _dtypes(op, arrays)
    strides = {row.row_stride_slot: n if dtypes[row.name] else 0 for row in rows if row.row_stride_slot is not None}
    return Facts(op.family, op.mode, n, target, dtypes, strides, {}, (), invariant=invariant)


def _dtypes(op: Operation, arrays: Sequence[jax.Array]) -> dict[str, Any]:
    """Return the dtypes of all tensors of the family by name; None for absent tensors."""
    dtypes: dict[str, Any] = dict.fromkeys([row.name for row in op.family.tensors])
    dtypes |= {row.name: operand.dtype for row, operand in zip(op.inputs, arrays, strict=True)}
    return dtypes | {name: jnp.dtype(dtype) for name, dtype in op.results}

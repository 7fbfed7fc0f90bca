"""The kernels of an operation on a GPU, each a custom call of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ..call_kinds import FEW, ROWS
from ..kernels.assembly import SUMS, Assembly, Facts, Recipe, assemble, in_software
from ..kernels.gpu import Target
from ..kernels.strides import RowWalk, kind_of
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
    shape = op.shape_in(operands)
    *leading, n = shape
    m = prod(leading)
    launches = _Launches(op, operands, m, n, lowered_for())
    made = launches.run(
        {row.slot: operand.reshape(op.shape_of(row, (m, n))) for row, operand in zip(op.inputs, operands, strict=True)}
    )
    return [made[row.slot].reshape(op.shape_of(row, shape)) for row in op.outputs]


class _Launches:
    """The kernels of an operation on m rows of n, chosen as those of a call from PyTorch are."""

    def __init__(self, op: Operation, operands: Sequence[jax.Array], m: int, n: int, target: Target) -> None:
        self.m, self._n, self._target = m, n, target
        self._numbers = op.numbers
        self._entry: Entry = dispatch.find(op.mode, n)
        self._shapes = {row.slot: op.shape_of(row, (m, n)) for row in op.outputs}
        self._dtypes = {row.slot: jnp.dtype(dtype) for row, (_, dtype) in zip(op.outputs, op.results, strict=True)}
        facts = _facts(op, operands, n, target, invariant=self._entry.is_invariant)
        size = self._entry.size(m)
        dispatch.tell(lambda: kind_of(op.mode.name, {"n": n}, size, _dtypes(op, operands), facts.strides, ()))
        self._made: Assembly = assemble(facts, self._entry.choices(m, n, target.arch), m, few=ROWS[size] == FEW)
        self._programs = self._made.programs(m, 1)
        # y as bytes, where kernels encode fp8 themselves.
        self._as_bytes = {"y_ptr": "uint8"} if in_software(op.mode.dtype_out, target) else {}

    def run(self, given: Arrays) -> dict[str, jax.Array]:
        """Every result, by its slot."""
        known = dict(given)
        partials = {f"{name}_ptr": ((self._programs, self._n), "float32") for name in SUMS}
        terms = dict.fromkeys(self._made.row_terms, ((self.m,), "float32"))
        own = {slot: (shape, self._as_bytes.get(slot, self._dtypes[slot])) for slot, shape in self._shapes.items()}
        for recipe in self._made.walkers:
            self._call(recipe, known, {**own, **partials, **terms})
        if self._made.finisher is not None:
            left = {f"{name}_partials_ptr": known.pop(f"{name}_ptr") for name in SUMS if f"{name}_ptr" in known}
            known |= left
            self._call(self._made.finisher, known, own)
        return {
            slot: jax.lax.bitcast_convert_type(known[slot], self._dtypes[slot])
            if slot in self._as_bytes
            else known[slot]
            for slot in self._shapes
        }

    def _call(
        self, recipe: Recipe, known: dict[str, jax.Array], makes: Mapping[str, tuple[Sequence[int], Any]]
    ) -> None:
        """Launch a kernel on what is known, and add what it makes to that."""
        source = source_of(self._entry, recipe.part)
        key = recipe.key(source.name, source.parameters, self._target)
        code = code_of(key, source, self._target)
        brought = [(name, word) for name, word in key.arguments if name not in recipe.constants and word is not None]
        pointers = [name for name, word in brought if str(word).startswith("*")]
        reads = [name for name in pointers if name in known]
        writes = pointers[len(reads) :]
        # Arrays of a custom call are its operands, and then its results.
        assert pointers[: len(reads)] == reads, f"{key} reads what lies behind what it writes"
        grid = recipe.grid(self.m, self._programs)
        parameters = [None if name in pointers else (self._number(recipe, name), str(word)) for name, word in brought]
        capability = int(self._target.arch.removeprefix("sm_"))
        message = jaxlib_triton.message(code.name, code.ptx, code.warps, code.shared, capability, grid, parameters)
        results = [jax.ShapeDtypeStruct(*makes[name]) for name in writes]
        call = jax.ffi.ffi_call(jaxlib_triton.TARGET, results)
        known |= zip(writes, call(*[known[name] for name in reads], name=code.name, opaque=message), strict=True)

    def _number(self, recipe: Recipe, name: str) -> float | int:
        if name in recipe.strides:
            stride = recipe.strides[name]
            assert not isinstance(stride, RowWalk)
            return stride
        whole = {"M": self.m, "programs": self._programs}
        return whole[name] if name in whole else float(self._numbers[name])


def _facts(op: Operation, given: Sequence[jax.Array], n: int, target: Target, *, invariant: bool) -> Facts:
    """Return the facts that kernels are chosen by: XLA allocates aligned arrays without gaps."""
    rows, dtypes = op.family.tensors, _dtypes(op, given)
    strides = {row.row_stride_slot: n if dtypes[row.name] else 0 for row in rows if row.row_stride_slot is not None}
    return Facts(op.family, op.mode, n, target, dtypes, strides, {}, (), invariant=invariant)


def _dtypes(op: Operation, given: Sequence[jax.Array]) -> dict[str, Any]:
    """Return the dtypes of all tensors of the family by name; None for absent tensors."""
    dtypes: dict[str, Any] = dict.fromkeys([row.name for row in op.family.tensors])
    dtypes |= {row.name: operand.dtype for row, operand in zip(op.inputs, given, strict=True)}
    return dtypes | {name: jnp.dtype(dtype) for name, dtype in op.results}

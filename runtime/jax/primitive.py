"""A primitive for each side of a norm: one that JAX transforms and partitions, and one that becomes kernels.

Of the first, vmap joins rows, a partitioner splits them, and a derivative of a derivative is that of the formula. It
is lowered to the second on what one device holds: kernels on CUDA, the formula anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ..codegen.families import Kind
from ..errors import GradientError
from ..selection.invariance import refuse_others
from ..upstream.jax_internals import needs_devices
from .formulas import computed
from .launches import launched
from .operation import Operation

_norm = Primitive("normforge_norm")
_kernels = Primitive("normforge_kernels")


def apply(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    """Return the results of an operation."""
    return list(_norm.bind(*operands, op=op))


def _abstract(*avals: Any, op: Operation) -> list[Any]:
    rows = avals[op.rows_at]
    out_avals = []
    for row, (_, dtype) in zip(op.outputs, op.results, strict=True):
        shape = op.shape_of(row, rows.shape)
        spec = _spec(rows)
        kept = {Kind.ROWS: spec, Kind.VECTOR: (None,), Kind.PER_ROW: spec[:-1]}[row.kind]
        sharding = rows.sharding.update(spec=PartitionSpec(*kept))
        out_avals.append(rows.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding))
    return out_avals


def _on_kernels(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    # No launch has no programs.
    if 0 in operands[op.rows_at].shape:
        return computed(*operands, op=op)
    return list(_kernels.bind(*operands, op=op))


@cache
def _partitioned(op: Operation) -> Any:
    """Return the operation on arrays of several devices: each device takes its rows, and sums are all-reduced."""
    function = custom_partitioning(lambda *operands: _on_kernels(*operands, op=op))
    letters = {Kind.ROWS: "... n", Kind.VECTOR: "n", Kind.PER_ROW: "..."}
    rule = " -> ".join(", ".join(letters[row.kind] for row in side) for side in (op.inputs, op.outputs))

    def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        of_shard, *specs = _split(op, arguments[op.rows_at])
        reads, writes = ([NamedSharding(mesh, spec) for spec in side] for side in specs)
        return mesh, of_shard, writes, tuple(reads)

    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda *about: partition(*about)[2],
        sharding_rule=rule,
        need_replication_factors=("n",),
    )
    return function


def _spec(rows: Any) -> tuple[Any, ...]:
    """Return the axes of the mesh that an array is split over, by its dimensions."""
    spec = tuple(rows.sharding.spec)
    return (*spec, *[None] * (len(rows.shape) - len(spec)))


def _split(op: Operation, rows: Any) -> tuple[Any, tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
    """Return the function of one device, and how the operands and the results lie, given an array of the rows."""
    whole = (*_spec(rows)[:-1], None)
    reads, writes = (tuple(PartitionSpec(*op.shape_of(row, whole)) for row in side) for side in (op.inputs, op.outputs))
    return partial(_of_shard, tuple(jax.tree.leaves(whole)), op=op), reads, writes


def _of_shard(axes: tuple[str, ...], *operands: jax.Array, op: Operation) -> list[jax.Array]:
    """Compute the results of one device; partial sums are rounded once, after the sum over all devices."""
    if not axes or not op.sums:
        return _on_kernels(*operands, op=op)
    parts = _on_kernels(*operands, op=op.with_sums_in("float32"))
    return [
        jax.lax.psum(part, axes).astype(dtype) if name in op.sums else part
        for part, (name, dtype) in zip(parts, op.results, strict=True)
    ]


def _batched(operands: Sequence[jax.Array], axes: Sequence[int | None], *, op: Operation) -> tuple[Any, Any]:
    """Rows of all members of a batch are those of one call."""
    size = next(operand.shape[axis] for operand, axis in zip(operands, axes, strict=True) if axis is not None)
    shared = [
        operand if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    by_member = [axis is not None for axis in axes]
    vectors = [there for there, row in zip(by_member, op.inputs, strict=True) if row.kind is Kind.VECTOR]
    if any(vectors):
        # A launch has one weight: one for each member.
        def of_member(at: jax.Array) -> list[jax.Array]:
            return apply(*[each[at] if there else each for each, there in zip(shared, by_member, strict=True)], op=op)

        results = jax.lax.map(of_member, jnp.arange(size))
        return results, [0] * len(results)
    joined = [
        operand if there or row.kind is Kind.VECTOR else jnp.broadcast_to(operand[None], (size, *operand.shape))
        for operand, there, row in zip(shared, by_member, op.inputs, strict=True)
    ]
    if not op.sums:
        results = apply(*joined, op=op)
        return results, [0] * len(results)
    others = op.without(op.sums)
    outputs = others.named(apply(*joined, op=others))
    alone = op.without(tuple(outputs))
    axes_in = [None if row.kind is Kind.VECTOR else 0 for row in op.inputs]
    outputs |= alone.named(jax.vmap(partial(computed, op=alone), axes_in)(*joined))
    return [outputs[name] for name, _ in op.results], [0] * len(op.results)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], *, op: Operation) -> tuple[Any, Any]:
    if op.mode.fquant.quantises:
        raise GradientError(
            "a quantised norm has no gradient; differentiate normforge.jax.layer_norm or rms_norm, or put "
            "jax.lax.stop_gradient around its operands"
        )
    results: tuple[Any, Any] = jax.jvp(
        partial(computed, op=op), tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
    )
    return results


def _off_gpus(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    refuse_others(op.mode.name, "XLA", "lower it for a GPU")
    return computed(*operands, op=op)


def _lowered_by_shards(context: Any, *operands: Any, op: Operation) -> Any:
    mesh = context.avals_in[op.rows_at].sharding.mesh

    def explicit(*operands: jax.Array) -> list[jax.Array]:
        """Run `_of_shard` on explicit shardings, where a partitioner would give a shard the type of the whole array."""
        of_shard, reads, writes = _split(op, context.avals_in[op.rows_at])
        with jax.sharding.use_abstract_mesh(mesh):
            mapped = jax.shard_map(of_shard, mesh=mesh, in_specs=reads, out_specs=list(writes), check_vma=False)
            lying = [jax.sharding.reshard(operand, spec) for operand, spec in zip(operands, reads, strict=True)]
            specs = [aval.sharding.spec for aval in context.avals_out]
            return list(map(jax.sharding.reshard, mapped(*lying), specs))

    shards = explicit if not mesh.empty and mesh.are_all_axes_explicit else _partitioned(op)
    return mlir.lower_fun(shards, multiple_results=True)(context, *operands)


for _primitive in (_norm, _kernels):
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_abstract)
needs_devices(_norm)
_norm.def_impl(jax.jit(apply, static_argnames="op"))
batching.primitive_batchers[_norm] = _batched
ad.primitive_jvps[_norm] = _differentiated
mlir.register_lowering(_norm, _lowered_by_shards)
mlir.register_lowering(_kernels, mlir.lower_fun(_off_gpus))
mlir.register_lowering(_kernels, mlir.lower_fun(launched), platform="cuda")

"""A primitive for each side of a norm: one that JAX transforms and partitions, and one that becomes kernels.

Of the first, vmap joins rows, a partitioner splits them, and a derivative of a derivative is that of the formula. It
is lowered to the second on what one device holds: kernels on CUDA, the formula anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ..selection.invariance import refuse_others
from ..upstream.jax_internals import needs_devices
from .formulas import computed
from .launches import launched
from .operation import Operation, Sizes, Tensor

_norm = Primitive("normforge_norm")
_kernels = Primitive("normforge_kernels")


def apply(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    """Return the results of an operation."""
    return list(_norm.bind(*operands, op=op))


def _abstract(*avals: Any, op: Operation) -> list[Any]:
    first, sizes, split = avals[0], op.sizes([aval.shape for aval in avals]), op.sizes([*map(_spec, avals)])
    whole = {**split, **dict.fromkeys(op.whole, (None,))}
    out_avals = []
    for each in op.results:
        sharding = first.sharding.update(spec=_spec_of(each, whole if each.summed else split))
        described = {"shape": each.shape(sizes), "dtype": jnp.dtype(each.dtype), "sharding": sharding}
        out_avals.append(first.update(**described, weak_type=False))
    return out_avals


def _on_kernels(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    # No launch has no programs.
    if any(0 in operand.shape for operand in operands):
        return computed(*operands, op=op)
    return list(_kernels.bind(*operands, op=op))


@cache
def _partitioned(op: Operation) -> Any:
    """Return the operation on arrays of several devices: each device takes its part, and sums are all-reduced."""
    function = custom_partitioning(lambda *operands: _on_kernels(*operands, op=op))
    rule = " -> ".join(", ".join(each.dims for each in side) for side in (op.operands, op.results))

    def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        of_shard, *specs = _split(op, arguments)
        reads, writes = ([NamedSharding(mesh, spec) for spec in side] for side in specs)
        return mesh, of_shard, writes, tuple(reads)

    function.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda *about: partition(*about)[2],
        sharding_rule=rule,
        need_replication_factors=op.whole,
    )
    return function


def _spec(array: Any) -> tuple[Any, ...]:
    """Return the axes of the mesh that an array is split over, by its dimensions."""
    # GSPMD says nothing of some arrays.
    spec = () if array.sharding is None else tuple(array.sharding.spec)
    return (*spec, *[None] * (len(array.shape) - len(spec)))


def _spec_of(tensor: Tensor, axes: Sizes) -> PartitionSpec:
    """Return how an array lies, given the axes by dimension; each axis splits the first of an array's dimensions."""
    entries: list[tuple[str, ...]] = []
    for entry in tensor.shape(axes):
        entries.append(tuple(axis for axis in jax.tree.leaves(entry) if axis not in chain(*entries)))
    return PartitionSpec(*[entry or None for entry in entries])


def _split(op: Operation, arrays: Sequence[Any]) -> tuple[Any, tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
    """Return the function of one device, and how the operands and the results lie, given arrays of the operands."""
    axes = {**op.sizes([*map(_spec, arrays)]), **dict.fromkeys(op.whole, (None,))}
    reads, writes = (tuple(_spec_of(each, axes) for each in side) for side in (op.operands, op.results))
    over = {each.name: [axes[name] for name in each.summed.split()] for each in op.results}
    sums = {name: tuple(dict.fromkeys(jax.tree.leaves(dims))) for name, dims in over.items()}
    return partial(_of_shard, sums, op=op), reads, writes


def _of_shard(sums: Mapping[str, tuple[str, ...]], *operands: jax.Array, op: Operation) -> list[jax.Array]:
    """Compute the results of one device; partial sums are rounded once, after the sum over axes of the mesh."""
    if not any(sums.values()):
        return _on_kernels(*operands, op=op)
    parts = zip(_on_kernels(*operands, op=op.with_sums_in("float32")), op.results, strict=True)
    return [jax.lax.psum(part, sums[own.name]).astype(own.dtype) if own.summed else part for part, own in parts]


def _batched(operands: Sequence[jax.Array], axes: Sequence[int | None], *, op: Operation) -> tuple[Any, Any]:
    """Rows of all members of a batch are those of one call."""
    shared = [each if at is None else jnp.moveaxis(each, at, 0) for each, at in zip(operands, axes, strict=True)]
    size = next(each.shape[0] for each, at in zip(shared, axes, strict=True) if at is not None)
    by_member, by_row = [axis is not None for axis in axes], ["..." in each.dims for each in op.operands]
    if any(there and not joins for there, joins in zip(by_member, by_row, strict=True)):
        # A launch has one weight: one for each member.
        def of_member(at: jax.Array) -> list[jax.Array]:
            return apply(*[each[at] if there else each for each, there in zip(shared, by_member, strict=True)], op=op)

        return jax.lax.map(of_member, jnp.arange(size)), [0] * len(op.results)
    every = zip(shared, by_member, by_row, strict=True)
    joined = [jnp.broadcast_to(x, (size, *x.shape)) if joins and not there else x for x, there, joins in every]
    if not op.sums:
        return apply(*joined, op=op), [0] * len(op.results)
    others = op.without(op.sums)
    outputs = others.named(apply(*joined, op=others))
    alone = op.without(tuple(outputs))
    axes_in = [0 if joins else None for joins in by_row]
    outputs |= alone.named(jax.vmap(partial(computed, op=alone), axes_in)(*joined))
    return [outputs[each.name] for each in op.results], [0] * len(op.results)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], *, op: Operation) -> Any:
    return jax.jvp(partial(computed, op=op), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _off_gpus(*operands: jax.Array, op: Operation) -> list[jax.Array]:
    refuse_others(op.parts[0].mode.name, "XLA", "lower it for a GPU")
    return computed(*operands, op=op)


def _lowered_by_shards(context: Any, *operands: Any, op: Operation) -> Any:
    mesh = context.avals_in[0].sharding.mesh

    def explicit(*operands: jax.Array) -> list[jax.Array]:
        """Run `_of_shard` on explicit shardings, where a partitioner would give a shard the type of the whole array."""
        of_shard, reads, writes = _split(op, context.avals_in)
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

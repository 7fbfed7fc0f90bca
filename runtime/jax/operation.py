"""One call as a primitive of JAX knows it, a norm, a rotation or a gradient: hashable, and made of words and numbers.

Whatever JAX asks of an operation follows from the names of its arrays' dimensions: shapes, shards, batches and sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from ..codegen.families import Kind, Result
from ..codegen.groups import AnyMode
from ..codegen.lazy import cached_property
from ..codegen.model import Mode
from ..codegen.parameters import family_of
from ..codegen.several import suffix
from ..codegen.values import Direction, DType, FusedAdd, Norm
from ..kernels import rotary

# The manifest's types that JAX has, by numpy's names.
DTYPES = {each.value.replace("bf", "bfloat").replace("fp", "float"): each for each in DType if each.packs == 1}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The dimensions of a family's tensors, ahead of positions where channels are normalised.
_DIMS = {Kind.ROWS: "... N", Kind.IMAGES: "... N", Kind.VECTOR: "N", Kind.PER_ROW: "..."}

Sizes = Mapping[str, tuple[Any, ...]]
Words = Mapping[str, str]
_NONE: Words = {}


class Tensor(NamedTuple):
    """An operand or a result.

    Attributes:
        name: the kernels' name for it.
        dtype: numpy's name of its type.
        dims: the names of its dimensions; "..." in front, with a digit or without, is any number of them. Devices may
            share out a dimension, but each has all of one in capital letters.
        gradient: for an operand, the result of the gradient's operation that is its gradient; "" if it has none.
        summed: for a result, the dimensions of operands that it is a sum over.
    """

    name: str
    dtype: str
    dims: str
    gradient: str = ""
    summed: str = ""

    def sizes(self, shape: Sequence[Any]) -> Sizes:
        """Return the sizes of dimensions by their names, given a shape."""
        names = self.dims.split()
        ahead = len(shape) - len(names) + 1 if "..." in self.dims else 0
        sizes = ([tuple(shape[:ahead])] if "..." in self.dims else []) + [(size,) for size in shape[ahead:]]
        return dict(zip(names, sizes, strict=False))

    def shape(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return the shape, given the sizes of dimensions by their names."""
        return tuple(size for name in self.dims.split() for size in sizes[name])


@dataclass(frozen=True)
class Heads:
    """The mode of norms of queries and keys with their rotary embedding.

    Attributes:
        norm: the norm of a row.
        is_across: whether a row is all heads of a token.
        interleaved: whether both columns of a pair adjoin.
        rotary_dim: columns of a head that are rotated.
        height: pairs that turn by a second position of a token (mRoPE).
        width: pairs that turn by a third one.
        alternates: whether pairs take the three positions in turn.
        is_backward: whether gradients are computed.
    """

    norm: Norm
    is_across: bool
    interleaved: bool
    rotary_dim: int
    height: int
    width: int
    alternates: bool
    is_backward: bool = False

    @property
    def name(self) -> str:
        """The name of the kernel that walks the heads."""
        kernel = rotary.BACKWARD if self.is_backward else rotary.FORWARD
        return rotary.ACROSS[kernel] if self.is_across else kernel


@dataclass(frozen=True)
class Operation:
    """A call of kernels, its operands and its results.

    Attributes:
        mode: which kernels: a `Mode`, `GroupMode` or `Heads`, or the operations of norms that share a launch.
        operands: the tensors that there are, in the order of the kernels' parameters.
        results: what is returned.
        eps: added to the variance.
        weight_offset: added to weights.
    """

    mode: Any
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    eps: float = 0.0
    weight_offset: float = 0.0

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Return the types of all operands by name."""
        return {each.name: each.dtype for each in self.operands}

    @cached_property
    def whole(self) -> tuple[str, ...]:
        """Return the dimensions of which every device has all, in the order of their first operands, as Shardy asks."""
        return tuple(dict.fromkeys(name for each in self.operands for name in each.dims.split() if name.isupper()))

    @property
    def space(self) -> str:
        """The dimensions behind the channels of an operation on rows."""
        return self.operands[0].dims.partition("N")[2]

    @property
    def parts(self) -> tuple[Operation, ...]:
        """The operations of norms that share the launch, or this one."""
        return self.mode if isinstance(self.mode, tuple) else (self,)

    def shares(self, arrays: Iterable[Any], side: str = "operands") -> list[tuple[Operation, list[Any]]]:
        """Return each of `parts` with its own of all operands, or results."""
        left = iter(arrays)
        return [(part, [*islice(left, len(getattr(part, side)))]) for part in self.parts]

    @property
    def sums(self) -> tuple[str, ...]:
        """The results that are sums."""
        return tuple(each.name for each in self.results if each.summed)

    def sizes(self, shapes: Sequence[Sequence[Any]]) -> Sizes:
        """Return the sizes of dimensions by their names, given the operands' shapes; the first of an operand counts."""
        sizes: Sizes = {}
        for operand, shape in zip(self.operands, shapes, strict=True):
            sizes = {**operand.sizes(shape), **sizes}
        return sizes

    def named(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """Return results by their names."""
        return dict(zip([each.name for each in self.results], outputs, strict=True))

    def with_sums_in(self, dtype: str) -> Operation:
        """Return the operation with sums in another dtype."""
        results = [each._replace(dtype=dtype) if each.summed else each for each in self.results]
        return replace(self, results=tuple(results))

    def without(self, names: Sequence[str]) -> Operation:
        """Return the operation without some of its results."""
        return replace(self, results=tuple(each for each in self.results if each.name not in names))


def forward_of(mode: AnyMode, dtypes: Words, eps: float, weight_offset: float, space: str = "") -> Operation:
    """Return the operation of a forward mode, with statistics of channels; `dtypes` are its operands' by name."""

    def dtype_of(row: Result) -> str:
        return NAMES[getattr(mode, row.axis)] if row.axis else next((dtypes[name] for name in row.like), "float32")

    family, behind = family_of(mode), {"residual": "dy"} if mode.fadd.is_after else {}
    gradients = {} if mode.fquant.quantises else {row.name: row.gradient for row in family.inputs} | behind
    results = {row.name: dtype_of(row) for row in family.results if row.is_wanted(mode)}
    tensors = _tensors(family.inputs, dtypes, space, gradients), _tensors(family.results, results, space)
    return Operation(mode, *tensors, eps, weight_offset)


def _tensors(rows: Iterable[Any], dtypes: Words, space: str, gradients: Words = _NONE) -> tuple[Tensor, ...]:
    """Return the tensors of a family that have a dtype."""
    dims = {kind: dims + space * dims.startswith("...") for kind, dims in _DIMS.items()}
    found = [row for row in rows if row.name in dtypes]
    return tuple(Tensor(row.name, dtypes[row.name], dims[row.kind], gradients.get(row.name, "")) for row in found)


def joined(parts: Sequence[Operation]) -> Operation:
    """Return the operation of norms that share a launch; names of tensors end as those of the kernel's parameters."""

    def numbered(side: str) -> tuple[Tensor, ...]:
        return tuple(
            each._replace(name=each.name + suffix(at), dims=" ".join(f"{dim}{at}" for dim in each.dims.split()))
            for at, part in enumerate(parts)
            for each in getattr(part, side)
        )

    return parts[0] if len(parts) == 1 else Operation(tuple(parts), numbered("operands"), numbered("results"))


def forward_of_heads(mode: Heads, arrays: Mapping[str, Any], eps: float, weight_offset: float) -> Operation:
    """Return the operation of norms of heads, given its operands by name.

    Tokens are the leading dimensions of q. Positions, or else the rows of tables, may have the last of these alone.
    """
    by_token, alone = arrays.get("positions", arrays["cos"]), "positions" in arrays and not mode.height + mode.width
    count = by_token.ndim if alone else by_token.ndim - 1
    shared = " ".join(f"t{at}" for at in range(count if count < arrays["q"].ndim - 2 else 0))
    rows = shared or "..."
    dims = dict.fromkeys(("cos", "sin"), "P R" if "positions" in arrays else f"{rows} R")
    dims["positions"] = rows if alone else f"{rows} A"
    for own in "qk":
        dims[own] = f"... {shared} {own.upper() if mode.is_across else own} D"
        dims[f"{own}_weight"] = f"{own.upper()}D" if mode.is_across else "D"
    operands = [
        Tensor(name, arrays[name].dtype.name, dims[name], f"d{name}" if name[0] in "qk" else "")
        for name in rotary.NAMES[mode.name]
        if name in arrays
    ]
    results = [each._replace(name=f"{each.name}_out", gradient="") for each in operands[:2]]
    return Operation(mode, tuple(operands), tuple(results), eps, weight_offset)


def saving_of(forward: Operation) -> Operation:
    """Return a forward operation that also returns what the gradient reads of it."""
    mode = forward.mode
    if isinstance(mode, Heads) or mode.fquant.quantises:
        return forward
    saving = replace(mode, save_mv=True) if isinstance(mode, Mode) else mode
    return forward_of(saving, forward.dtypes, forward.eps, forward.weight_offset, forward.space)


def gradient_of(forward: Operation) -> Operation:
    """Return the operation that computes the gradients of a forward operation."""
    return (_gradient_of_heads if isinstance(forward.mode, Heads) else _gradient_of_rows)(forward)


def _gradient_of_heads(forward: Operation) -> Operation:
    q, k, *others = forward.operands
    summed = {f"{each.name}_weight": each.dims.removesuffix(" D") for each in (q, k)}
    arrived = [each._replace(name=f"d{each.name}") for each in forward.results]
    given = [each for each in forward.operands if each.gradient]
    results = [each._replace(name=each.gradient, gradient="", summed=summed.get(each.name, "")) for each in given]
    mode, operands = replace(forward.mode, is_backward=True), (*arrived, q, k, *others)
    return replace(forward, mode=mode, operands=operands, results=tuple(results))


def _gradient_of_rows(forward: Operation) -> Operation:
    args, outputs = forward.dtypes, {each.name: each.dtype for each in forward.results}
    # A sum is normalised as it is stored.
    rows = outputs.get("residual_out", args["x"])
    if isinstance(mode := forward.mode, Mode):
        # Nothing but dy arrives where the residual is added behind the norm.
        mode = Mode(mode.norm, DTYPES[rows], DTYPES[rows], FusedAdd.NONE if mode.fadd.is_after else mode.fadd)
    family = family_of(mode := replace(mode, direction=Direction.BACKWARD))
    dtypes = {"dy": outputs["y"], "x": rows, "dresidual_out": rows, "mean": "float32", "rstd": "float32"}
    dtypes |= {name: dtype for name, dtype in args.items() if name in ("weight", "bias")}
    grads = {each.gradient: each.dtype for each in forward.operands}
    # The gradient of two addends, in the least type that holds both: types that differ have fp32 in common alone.
    grads["dx"] = rows if rows == args["x"] else "float32"
    operands = _tensors([row for row in family.inputs if row.is_wanted(mode)], dtypes, forward.space)
    # A vector's gradient is a sum over rows.
    sums = {"N": f"...{forward.space}"}
    grads_of = _tensors(family.results, grads, forward.space)
    results = [each._replace(summed=sums.get(each.dims, "")) for each in grads_of]
    return replace(forward, mode=mode, operands=operands, results=tuple(results))

"""One norm, or its gradient, as a primitive of JAX knows it: hashable, and made of words and numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..codegen.families import Family, Kind, Parameter, Result
from ..codegen.lazy import cached_property
from ..codegen.model import Mode
from ..codegen.parameters import family_of
from ..codegen.values import Direction, DType, FusedAdd
from ..kernels.assembly import SUMS

# numpy's names of types, by the manifest's words.
NAMES = {
    DType.FP16: "float16",
    DType.BF16: "bfloat16",
    DType.FP32: "float32",
    DType.INT8: "int8",
    DType.FP8_E4M3FN: "float8_e4m3fn",
    DType.FP8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.FP8_E5M2: "float8_e5m2",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Operation:
    """A norm or a gradient, its operands and its results.

    Attributes:
        mode: which kernels.
        operands: the names of the tensors that there are, of the family's inputs and in their order, with numpy's names
            of their types.
        results: the names of what is returned, in the family's order, with numpy's names of their types.
        eps: added to the variance; nothing backward.
        weight_offset: added to weight.
    """

    mode: Mode
    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    eps: float = 0.0
    weight_offset: float = 0.0

    @property
    def family(self) -> Family:
        """The functions whose rows say what operands and results are."""
        return family_of(self.mode)

    @cached_property
    def inputs(self) -> tuple[Parameter, ...]:
        """Return the family's rows of the operands."""
        dtypes = dict(self.operands)
        return tuple(row for row in self.family.inputs if row.name in dtypes)

    @cached_property
    def outputs(self) -> tuple[Result, ...]:
        """Return the family's rows of the results."""
        dtypes = dict(self.results)
        return tuple(row for row in self.family.results if row.name in dtypes)

    @property
    def sums(self) -> tuple[str, ...]:
        """The results that are sums over rows."""
        return tuple(name for name, _ in self.results if name in SUMS)

    def shape_of(self, row: Parameter | Result, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an operand or a result, given the shape of x."""
        return tuple({Kind.ROWS: shape, Kind.VECTOR: shape[-1:], Kind.PER_ROW: shape[:-1]}[row.kind])

    @property
    def rows_at(self) -> int:
        """Which operand is the first that has rows."""
        return next(at for at, row in enumerate(self.inputs) if row.kind is Kind.ROWS)

    def named(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """Return results by their names."""
        return dict(zip([name for name, _ in self.results], outputs, strict=True))

    def with_sums_in(self, dtype: str) -> Operation:
        """Return the operation with sums over rows in another dtype."""
        return replace(self, results=tuple((name, dtype if name in SUMS else own) for name, own in self.results))

    def without(self, names: Sequence[str]) -> Operation:
        """Return the operation without some of its results."""
        return replace(self, results=tuple(result for result in self.results if result[0] not in names))


def forward_of(mode: Mode, dtypes: Mapping[str, str], eps: float, weight_offset: float) -> Operation:
    """Return the operation of a forward mode; `dtypes` are those of its operands by name."""

    def dtype_of(row: Result) -> str:
        return NAMES[getattr(mode, row.axis)] if row.axis else next((dtypes[name] for name in row.like), "float32")

    family = family_of(mode)
    operands = tuple((row.name, dtypes[row.name]) for row in family.inputs if row.name in dtypes)
    results = tuple((row.name, dtype_of(row)) for row in family.results if row.is_wanted(mode))
    return Operation(mode, operands, results, eps, weight_offset)


def gradient_of(forward: Operation) -> Operation:
    """Return the operation that computes the gradients of a forward operation."""
    args, outputs = dict(forward.operands), dict(forward.results)
    # A sum is normalised as it is stored.
    rows = outputs.get("residual_out", args["x"])
    # Nothing but dy arrives where the residual is added behind the norm.
    fadd = FusedAdd.NONE if forward.mode.fadd.is_after else forward.mode.fadd
    mode = Mode(forward.mode.norm, DTYPES[rows], DTYPES[rows], fadd, direction=Direction.BACKWARD)
    family = family_of(mode)
    dtypes = {"dy": outputs["y"], "x": rows, "dresidual_out": rows, "mean": "float32", "rstd": "float32"}
    dtypes |= {name: dtype for name, dtype in args.items() if name == "weight"}
    grads = {row.gradient: args[row.name] for row in forward.inputs}
    # The gradient of two addends, in the least type that holds both: types that differ have fp32 in common alone.
    grads["dx"] = rows if rows == args["x"] else "float32"
    return Operation(
        mode,
        tuple((row.name, dtypes[row.name]) for row in family.inputs if row.is_wanted(mode) and row.name in dtypes),
        tuple((row.name, grads[row.name]) for row in family.results if row.name in grads),
        weight_offset=forward.weight_offset,
    )

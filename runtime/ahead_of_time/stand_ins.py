"""Calls of stand-ins for tensors: plans of a deployment's calls, without the tensors and without a GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product

import torch

from ..call_kinds import ROWS, USUAL_ROWS
from ..calls.check import Call, check
from ..calls.plan import Plan
from ..calls.row_gradients import call_of
from ..calls.row_layout import MOST_STRIDES, rows_overlap
from ..codegen.axes import SAME
from ..codegen.families import Kind as Shape
from ..codegen.families import Parameter
from ..codegen.groups import AnyMode, GroupMode
from ..codegen.model import Mode
from ..codegen.parameters import BACKWARD, FAMILIES, family_of
from ..dtypes import DTYPES, FLOATS, TORCH_DTYPES, arguments_of
from ..errors import ConflictError, ShapeError
from ..families.group.row import call_in_memory, slots_of
from ..kernels.assembly import SUMS
from ..kernels.gpu import Target
from .modes_and_sizes import ROW_ARGUMENTS, GroupShape, listed, refuse_others

# The words of `compile_keys` for a tensor's type: a dtype, "same" for x's (`Mode.operand_dtype`), or None for an
# optional tensor that is left out.
Kind = torch.dtype | str | None


# A stride, or several with the sizes between them, the outermost first: (6144, 32, 128).
Steps = int | tuple[int, ...]
# The strides of x, or of arguments by name; None if all rows adjoin.
Asked = Steps | Mapping[str, Steps] | None


@dataclass(frozen=True)
class RowPlaces:
    """The shape and the row strides of one call's tensors.

    Attributes:
        shape: the tensors'.
        steps: by the names of arguments, strides and the sizes between them; rows of any other adjoin.
    """

    shape: tuple[int, ...]
    steps: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, asked: Asked, n: int) -> RowPlaces:
        """Return the places that an entry of `row_strides` asks for, with rows of n elements.

        Raises:
            ConflictError: the entry names an argument without rows, or two of conflicting sizes, or holds no strides.
            ShapeError: rows would overlap.
        """
        by_name = asked if isinstance(asked, Mapping) else {} if asked is None else {"x": asked}
        steps = {name: _checked(name, step) for name, step in by_name.items()}
        sizes = max((step[1::2] for step in steps.values()), key=len, default=())
        for name, step in steps.items():
            if step[1::2] != sizes[len(sizes) - len(step[1::2]) :]:
                raise ConflictError(
                    f"row_strides has {by_name!r}, and {name} is of another shape than the tensor of {sizes} rows; "
                    "pass the same sizes for both, from the last"
                )
        # Two rows, because the stride of a single row says nothing.
        rows = cls((2, *sizes, n), steps)
        for name, step in steps.items():
            if rows_overlap(rows.empty(name, torch.int8)):
                less = f"less than N = {n}" if len(step) == 1 else f"whose rows of N = {n} overlap"
                raise ShapeError(
                    f"row_strides has {', '.join(map(str, step))}, {less}; it takes N or more, or None for N itself"
                )
        return rows

    def empty(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the stand-in of an argument that has rows."""
        step = self.steps.get(name, self.shape[-1:])
        strides = list(step[::-2])
        for size in self.shape[-1 - len(strides) : 0 : -1]:
            strides.append(strides[-1] * size)
        # On the CPU whatever the caller's default device is: planning takes no tensor without memory.
        return torch.empty_strided(self.shape, (*strides[::-1], 1), dtype=dtype, device="cpu")


def _checked(name: str, asked: object) -> tuple[int, ...]:
    """Return one argument's strides as a tuple."""
    step = asked if isinstance(asked, tuple) else (asked,)
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in step)
    if not whole or len(step) not in range(1, 2 * MOST_STRIDES, 2):
        raise ConflictError(
            f"row_strides has {asked!r}; it takes a stride, or up to {MOST_STRIDES} with the rows between them, "
            "(6144, 32, 128) say, or a mapping from arguments to such"
        )
    refuse_others("row_strides", [name], ROW_ARGUMENTS, "names of arguments: ")
    return step


@dataclass
class Deployment:
    """The properties of calls that a mode does not fix; see `compile_keys`, whose defaults these are."""

    weight_dtypes: Iterable[Kind] = (SAME,)
    bias_dtypes: Iterable[Kind] | None = None
    residual_dtypes: Iterable[Kind] = (SAME,)
    smooth_dtypes: Iterable[Kind] = (torch.float32,)
    dy_dtypes: Iterable[Kind] = (SAME,)
    wants: Iterable[Collection[str]] | None = None
    row_strides: Iterable[Asked] = (None,)
    misaligned: Iterable[Collection[str]] = ((),)
    rows: Iterable[str] = USUAL_ROWS
    y_dtypes: Iterable[Kind] = (SAME,)

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if values is not None:
                setattr(self, name, listed(name, values))
        for name in ("weight_dtypes", "bias_dtypes", "residual_dtypes", "smooth_dtypes", "dy_dtypes", "y_dtypes"):
            absent = " or None (no such tensor)" if name in ("weight_dtypes", "bias_dtypes") else ""
            for kind in getattr(self, name) or ():
                if not (kind in FLOATS or kind == SAME or (absent and kind is None)):
                    raise ConflictError(
                        f"{name} has {kind!r}; it takes {', '.join(map(str, FLOATS))}, {SAME!r} (x's dtype){absent}"
                    )
        refuse_others("rows", self.rows, ROWS)
        refuse_others("wants", chain(*(self.wants or ())), _GRADIENTS)
        refuse_others("misaligned", chain(*self.misaligned), _POINTERS, "names of arguments: ")


_GRADIENTS = tuple(result.name for result in BACKWARD.results)

# The arguments that are addresses, with the kernels' names for them.
_POINTERS = {row.name: row.slot for family in FAMILIES for row in (*family.inputs, *family.outs)}


def plans(
    mode: AnyMode, size: int | GroupShape, target: Target, deployment: Deployment, *, saves: bool = False
) -> Iterator[Plan]:
    """Yield a plan for each combination of properties that calls of a mode may have.

    Args:
        mode: the mode of the calls.
        size: the row length, or of GroupNorm the shape of x.
        target: the GPU.
        deployment: the properties of calls that the mode does not fix.
        saves: whether some calls of GroupNorm's forward mode save statistics, for a backward pass.
    """
    if isinstance(mode, GroupMode):
        assert isinstance(size, GroupShape)
        for call, names in _group_calls(mode, size, deployment, saves=saves):
            # JAX's statistics are arrays of their own.
            yield Plan(call, slots_of(call, names) - {"rstd_ptr" if target.plainly else ""}, target)
    else:
        assert isinstance(size, int)
        for call, names in _calls(mode, size, deployment):
            yield Plan(call, [_POINTERS[name] for name in names], target)


def _calls(mode: Mode, n: int, deployment: Deployment) -> Iterator[tuple[Call, Collection[str]]]:
    """Yield calls of a mode of rows, each with the names of its misaligned tensors."""
    reads = [row.name for row in family_of(mode).inputs if row.is_wanted(mode)]
    options = {"residual": deployment.residual_dtypes, "smooth_scale": deployment.smooth_dtypes}
    further = {name: asked for name, asked in options.items() if name in reads}
    if mode.is_backward:
        further["dy"] = _dy_kinds(mode, deployment)
    make = _forward if not mode.is_backward else _sharing_backward if mode.shares else _backward
    for weight, stride, names in product(deployment.weight_dtypes, deployment.row_strides, deployment.misaligned):
        rows = RowPlaces.of(stride, n)
        if (mode.modulated or mode.grouped) and len(rows.shape) == 2:
            # Several rows per sample, or groups per token.
            rows = replace(rows, shape=(rows.shape[0], *rows.shape))
        biases = (deployment.bias_dtypes or (weight,)) if mode.norm.centres else (None,)
        for bias, *kinds in product(biases, *further.values()):
            operands = {"weight": weight, "bias": bias, **dict(zip(further, kinds, strict=True))}
            for call in make(mode, rows, operands, deployment.wants):
                yield call, names


# By the names of operands. Further operands have x's dtype.
_Kinds = Mapping[str, Kind]
_Wants = Iterable[Collection[str]] | None


def _forward(mode: Mode, rows: RowPlaces, kinds: _Kinds, _: _Wants) -> Iterator[Call]:
    arguments = arguments_of(mode, partial(_operand, mode, rows, kinds))
    if "out" in rows.steps and not mode.shares:
        arguments["out"] = rows.empty("out", TORCH_DTYPES[mode.dtype_out])
    if "residual_out" in rows.steps and mode.fadd.stores and not mode.shares:
        arguments["residual_out"] = rows.empty("residual_out", arguments["residual"].dtype)
    yield check(family_of(mode).functions[mode.norm], arguments)


def _backward(mode: Mode, rows: RowPlaces, kinds: _Kinds, asked: _Wants) -> Iterator[Call]:
    vectors = {"dweight": kinds["weight"], "dbias": kinds["bias"]}
    results = family_of(mode).results
    due = [row.name for row in results if row.is_wanted(mode) and vectors.get(row.name, SAME) is not None]
    for names in (due,) if asked is None else asked:
        wants = [name for name in due if name in names]
        if wants:
            arguments = {**arguments_of(mode, partial(_operand, mode, rows, kinds)), "wants": wants}
            arguments["bias_dtype"] = None if kinds["bias"] is None else _dtype(kinds["bias"], mode)
            yield check(family_of(mode).functions[mode.norm], arguments)


def _sharing_backward(mode: Mode, rows: RowPlaces, kinds: _Kinds, _: _Wants) -> Iterator[Call]:
    """Yield the call of modulated or gated rows that adjoin, where all gradients are due.

    The row stride of groups is a whole row of two groups, and no kernel is compiled for this stride.
    """
    n = rows.shape[-1]
    own = TORCH_DTYPES[mode.dtype_in]
    sums = {f"d{name}": None if kinds[name] is None else _dtype(kinds[name], mode) for name in ("weight", "bias")}
    if mode.modulated:
        # Without a weight, the sums are the gradients of the vectors per sample.
        sums = dict.fromkeys(sums, own if kinds["weight"] is None else torch.float32)
    due = {row.name: own for row in family_of(mode).results if row.name not in sums and row.is_wanted(mode)}
    due |= {name: dtype for name, dtype in sums.items() if dtype is not None}
    adjoining = RowPlaces((2, 2 * n) if mode.grouped else (2, 2, n), {})
    yield call_of(mode, 4, n, arguments_of(mode, partial(_operand, mode, adjoining, kinds)), due)


def _dy_kinds(mode: Mode, deployment: Deployment) -> list[Kind]:
    """Return the dtypes of dy that calls may bring; rows that are rounded first need a dtype of 16 bits."""
    asked = [TORCH_DTYPES[mode.dy_format.dtype]] if mode.dy_format.is_fp8 else deployment.dy_dtypes
    types = {kind: _dtype(kind, mode) for kind in asked}
    fitting = [kind for kind, dtype in types.items() if mode.cast is mode.cast.of(DTYPES[dtype], mode.dtype_in)]
    if not fitting:
        raise ConflictError(
            f"{mode.name} rounds rows to dy's 16 bits, and dy_dtypes has {', '.join(map(str, types.values()))}; "
            "add torch.float16 or torch.bfloat16 to it"
        )
    return fitting


def _operand(mode: Mode, rows: RowPlaces, kinds: _Kinds, parameter: Parameter) -> torch.Tensor | None:
    """Return the stand-in for an operand, in the dtype of `kinds` or in its usual dtype; None for no operand."""
    name, kind = parameter.name, parameter.kind
    if name == "x":
        return rows.empty(name, TORCH_DTYPES[mode.dtype_in])
    if kind is Shape.RANDOM:
        return torch.empty(2, dtype=torch.int64, device="cpu")
    is_fp32 = kind.is_scale or kind in (Shape.PER_ROW, Shape.VALUE)
    # The vectors of a second norm are like those of the first.
    asked = kinds.get(name.removeprefix("next_"), torch.float32 if is_fp32 else SAME)
    if asked is None:
        return None
    dtype = _dtype(asked, mode)
    if kind is Shape.ROWS or (kind is Shape.SAMPLES and name in rows.steps):
        return rows.empty(name, dtype)
    *outer, n = rows.shape
    shapes = {
        Shape.VECTOR: (n,),
        # If parts are groups, x's shape is (2, 2 * N).
        Shape.PER_PART: (2, n // 2) if mode.grouped else (n,),
        Shape.PER_SAMPLE: (outer[0], n),
        Shape.VALUE: (1,),
        Shape.GROUPS: rows.shape[-2 if mode.grouped else -1 :],
        Shape.SAMPLES: (outer[0], n),
        Shape.SCALES: (*outer, mode.dy_format.columns(n)),
    }
    # On the CPU whatever the caller's default device is: planning takes no tensor without memory.
    return torch.empty(shapes.get(kind, outer), dtype=dtype, device="cpu")


def _dtype(kind: Kind, mode: Mode) -> torch.dtype:
    return kind if isinstance(kind, torch.dtype) else TORCH_DTYPES[mode.operand_dtype]


def _group_calls(
    mode: GroupMode, shape: GroupShape, deployment: Deployment, *, saves: bool
) -> Iterator[tuple[Call, Collection[str]]]:
    """Yield calls of GroupNorm, each with the names of its misaligned tensors."""
    size, own = (shape.channels, shape.groups, shape.positions), TORCH_DTYPES[mode.dtype_in]

    def dtypes(kinds: Iterable[Kind]) -> list[torch.dtype | None]:
        return [own if kind == SAME else kind if isinstance(kind, torch.dtype) else None for kind in kinds]

    def call(operands: Mapping[str, torch.dtype | None], due: Mapping[str, torch.dtype | None]) -> Call:
        tensors = {name: torch.empty(0, dtype=dtype, device="cpu") for name, dtype in operands.items() if dtype}
        return call_in_memory(mode, size, tensors, {name: dtype for name, dtype in due.items() if dtype})

    for weight, names in product(dtypes(deployment.weight_dtypes), deployment.misaligned):
        biases = deployment.bias_dtypes if mode.span.centres else (None,)
        for bias in [weight] if biases is None else dtypes(biases):
            operands = {"x": own, "weight": weight, "bias": bias}
            if mode.is_backward:
                for dy, wants in product(dtypes(deployment.dy_dtypes), deployment.wants or (("dx", *SUMS),)):
                    due = {name: dtype for name, dtype in (("dweight", weight), ("dbias", bias)) if name in wants}
                    if any(due.values()) or "dx" in wants:
                        yield call({"dy": dy, **operands}, {"dx": own, **due}), names
            else:
                for y, saved in product(dtypes(deployment.y_dtypes), (False, True) if saves else (False,)):
                    statistics = dict.fromkeys(("mean", "rstd") if saved else (), torch.float32)
                    yield call(operands, {"y": y, **statistics}), names

"""Calls of stand-ins for tensors: plans of a deployment's calls, without the tensors and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ..call_kinds import ROWS
from ..calls.check import check
from ..calls.plan import Plan
from ..calls.row_gradients import call_of
from ..codegen.axes import SAME
from ..codegen.families import Kind as Shape
from ..codegen.families import Parameter
from ..codegen.groups import GroupMode
from ..codegen.model import Mode
from ..codegen.parameters import BACKWARD, FAMILIES, family_of
from ..codegen.values import Direction
from ..dtypes import DTYPES, FLOATS, TORCH_DTYPES, arguments_of
from ..errors import ConflictError
from ..families.group.row import call_in_memory, slots_of
from ..kernels.assembly import SUMS
from ..kernels.gpu import Target
from ..kernels.launcher import Launcher
from .modes_and_sizes import GroupShape
from .row_places import Asked, RowPlaces

# The words of `compile_keys` for a tensor's type: a dtype, "same" for x's (`Mode.operand_dtype`), or None for an
# optional tensor that is left out.
Kind = torch.dtype | str | None


def classes_of_rows(words: Sequence[str]) -> Sequence[str]:
    """Check that words are classes of M, and return the words.

    Raises:
        ConflictError: a word is no class.
    """
    for word in words:
        if word not in ROWS:
            raise ConflictError(f"rows has {word!r}; it takes some of {', '.join(ROWS)}")
    return words


@dataclass(frozen=True)
class Deployment:
    """The properties of calls that a mode does not fix; see `compile_keys`."""

    weight_dtypes: Sequence[Kind]
    bias_dtypes: Sequence[Kind] | None
    residual_dtypes: Sequence[Kind]
    smooth_dtypes: Sequence[Kind]
    dy_dtypes: Sequence[Kind]
    wants: Sequence[Collection[str]] | None
    row_strides: Sequence[Asked]
    misaligned: Sequence[Collection[str]]
    rows: Sequence[str]
    y_dtypes: Sequence[Kind] = (SAME,)

    def __post_init__(self) -> None:
        for name in ("weight_dtypes", "bias_dtypes", "residual_dtypes", "smooth_dtypes", "dy_dtypes", "y_dtypes"):
            kinds = getattr(self, name) or ()
            absent = " or None (no such tensor)" if name in ("weight_dtypes", "bias_dtypes") else ""
            for kind in kinds:
                if not (kind in FLOATS or kind == SAME or (absent and kind is None)):
                    raise ConflictError(
                        f"{name} has {kind!r}; it takes {', '.join(map(str, FLOATS))}, {SAME!r} (x's dtype){absent}"
                    )
        classes_of_rows(self.rows)
        for names in self.wants or ():
            for name in names:
                if name not in _GRADIENTS:
                    raise ConflictError(f"wants has {name!r}; it takes some of {', '.join(_GRADIENTS)}")
        for names in self.misaligned:
            for name in names:
                if name not in _POINTERS:
                    raise ConflictError(f"misaligned has {name!r}; it takes names of arguments: {', '.join(_POINTERS)}")


_GRADIENTS = tuple(result.name for result in BACKWARD.results)

# The arguments that are addresses, with the kernels' names for them.
_POINTERS = {row.name: row.slot for family in FAMILIES for row in (*family.inputs, *family.places)}


def plans(mode: Mode, n: int, target: Target, deployment: Deployment) -> Iterator[Plan]:
    """Yield a plan for each combination of dtypes, strides and alignments that calls of a mode may bring."""
    biases = (None,) if not mode.norm.centres else deployment.bias_dtypes
    for weight, stride, names in product(deployment.weight_dtypes, deployment.row_strides, deployment.misaligned):
        rows = RowPlaces.of(stride, n)
        if (mode.modulated or mode.grouped) and len(rows.shape) == 2:
            # Several rows per sample, or groups per token.
            rows = replace(rows, shape=(rows.shape[0], *rows.shape))
        misaligned = [_POINTERS[name] for name in names]
        for bias in (weight,) if biases is None else biases:
            calls = _Calls(mode, rows, target, deployment, {"weight": weight, "bias": bias}, misaligned)
            if not mode.is_backward:
                yield from calls.forward()
            else:
                yield from calls.sharing_backward() if mode.shares else calls.backward()


@dataclass(frozen=True)
class _Calls:
    """Calls of a mode with equal row strides and equal dtypes of vectors."""

    mode: Mode
    rows: RowPlaces
    target: Target
    deployment: Deployment
    kinds: Mapping[str, Kind]
    misaligned: Collection[str]

    def forward(self) -> Iterator[Plan]:
        mode, rows = self.mode, self.rows
        residuals = self.deployment.residual_dtypes if mode.fadd.adds else (None,)
        smooths = self.deployment.smooth_dtypes if mode.fquant.smooths else (None,)
        for residual, smooth in product(residuals, smooths):
            arguments = arguments_of(mode, self._maker(residual=residual, smooth_scale=smooth))
            if "out" in rows.steps and not mode.shares:
                arguments["out"] = rows.empty("out", TORCH_DTYPES[mode.dtype_out])
            if "residual_out" in rows.steps and mode.fadd.stores and not mode.shares:
                arguments["residual_out"] = rows.empty("residual_out", arguments["residual"].dtype)
            yield Plan(check(family_of(mode).functions[mode.norm], arguments), self.misaligned, self.target)

    def backward(self) -> Iterator[Plan]:
        mode = self.mode
        kinds = {f"d{name}": kind for name, kind in self.kinds.items()}
        due = [row.name for row in BACKWARD.results if row.is_wanted(mode) and kinds.get(row.name, SAME) is not None]
        asked = (due,) if self.deployment.wants is None else self.deployment.wants
        bias = self.kinds["bias"]
        for dy, names in product(self._dy_kinds(), asked):
            wants = [name for name in due if name in names]
            if not wants:
                continue
            arguments = {**arguments_of(mode, self._maker(dy=dy)), "wants": wants}
            arguments["bias_dtype"] = None if bias is None else _dtype(bias, mode)
            yield Plan(check(BACKWARD.functions[mode.norm], arguments), self.misaligned, self.target)

    def sharing_backward(self) -> Iterator[Plan]:
        """Yield plans of modulated or gated rows that adjoin, where all gradients are due.

        The row stride of groups is a whole row of two groups, and no kernel is compiled for this stride.
        """
        mode, n = self.mode, self.rows.shape[-1]
        own = TORCH_DTYPES[mode.dtype_in]
        weight, bias = (
            None if kind is None else _dtype(kind, mode) for kind in map(self.kinds.get, ("weight", "bias"))
        )
        if mode.modulated:
            # Without a weight, the sums are the gradients of the vectors per sample.
            summed = own if weight is None else torch.float32
            sums: dict[str, torch.dtype | None] = {"dweight": summed, "dbias": summed}
        else:
            sums = {"dweight": weight, "dbias": bias}
        due = {row.name: own for row in family_of(mode).results if row.name not in sums and row.is_wanted(mode)}
        due |= {name: dtype for name, dtype in sums.items() if dtype is not None}
        adjoining = replace(self, rows=RowPlaces((2, 2 * n) if mode.grouped else (2, 2, n), {}))
        for dy in self._dy_kinds():
            inputs = arguments_of(mode, adjoining._maker(dy=dy))
            yield Plan(call_of(mode, 4, n, inputs, due), self.misaligned, self.target)

    def _dy_kinds(self) -> list[Kind]:
        """Return the dtypes of dy that calls may bring; rows that are rounded first need a dtype of 16 bits."""
        mode, asked = self.mode, self.deployment.dy_dtypes
        types = [_dtype(kind, mode) for kind in asked]
        fitting = [
            kind
            for kind, dtype in zip(asked, types, strict=True)
            if mode.cast is mode.cast.of(DTYPES[dtype], mode.dtype_in)
        ]
        if types and not fitting:
            raise ConflictError(
                f"{mode.name} rounds rows to dy's 16 bits, and dy_dtypes has {', '.join(map(str, types))}; "
                "add torch.float16 or torch.bfloat16 to it"
            )
        return fitting

    def _maker(self, **further: Kind) -> Callable[[Parameter], torch.Tensor | None]:
        """Return a function that makes operands, in x's dtype or in the dtype of `kinds`, or None for no operand."""
        mode, rows, kinds = self.mode, self.rows, {**self.kinds, **further}

        def make(parameter: Parameter) -> torch.Tensor | None:
            if parameter.name == "x":
                return rows.empty("x", TORCH_DTYPES[mode.dtype_in])
            if parameter.kind is Shape.RANDOM:
                return torch.empty(2, dtype=torch.int64, device="cpu")
            is_fp32 = parameter.kind in (Shape.PER_ROW, Shape.SCALE, Shape.VALUE)
            kind = kinds.get(parameter.name, torch.float32 if is_fp32 else SAME)
            if kind is None:
                return None
            if parameter.kind is Shape.ROWS or (parameter.kind is Shape.SAMPLES and parameter.name in rows.steps):
                return rows.empty(parameter.name, _dtype(kind, mode))
            shapes = {
                Shape.VECTOR: rows.shape[-1:],
                # If parts are groups, x's shape is (2, 2 * N).
                Shape.PER_PART: (2, rows.shape[-1] // 2) if mode.grouped else rows.shape[-1:],
                Shape.PER_SAMPLE: (rows.shape[0], rows.shape[-1]),
                Shape.VALUE: (1,),
                Shape.GROUPS: rows.shape[-2 if mode.grouped else -1 :],
                Shape.SAMPLES: (rows.shape[0], rows.shape[-1]),
            }
            shape = shapes.get(parameter.kind, rows.shape[:-1])
            # On the CPU whatever the caller's default device is: planning takes no tensor without memory.
            return torch.empty(shape, dtype=_dtype(kind, mode), device="cpu")

        return make


def _dtype(kind: Kind, mode: Mode) -> torch.dtype:
    return kind if isinstance(kind, torch.dtype) else TORCH_DTYPES[mode.operand_dtype]


def launches(
    mode: GroupMode, shape: GroupShape, target: Target, deployment: Deployment, *, trained: bool
) -> Iterator[tuple[str, str, Launcher]]:
    """Yield the launches of calls of a mode: the instance, the class of the number of groups, and a launcher.

    Args:
        mode: the mode of the calls.
        shape: the shape of x.
        target: the GPU.
        deployment: the properties of calls that the mode does not fix.
        trained: whether some calls of a forward mode save statistics, for a backward pass.
    """
    for plan in _group_plans(mode, shape, target, deployment, trained=trained):
        for word, samples in shape.batches(plan.entry, deployment.rows).items():
            for launcher in plan.prepared(samples * shape.groups).launchers:
                yield plan.entry.name, word, launcher


def _group_plans(
    mode: GroupMode, shape: GroupShape, target: Target, deployment: Deployment, *, trained: bool
) -> Iterator[Plan]:
    """Yield a plan for each combination of properties that calls may have."""
    size, own = (shape.channels, shape.groups, shape.positions), TORCH_DTYPES[mode.dtype_in]

    def dtype(kind: Kind) -> torch.dtype | None:
        return own if kind == SAME else kind if isinstance(kind, torch.dtype) else None

    def plan(dtypes: Mapping[str, torch.dtype | None], names: Collection[str], due: dict[str, torch.dtype]) -> Plan:
        there = {name: kind for name, kind in dtypes.items() if kind is not None}
        tensors = {name: torch.empty(0, dtype=kind, device="cpu") for name, kind in there.items()}
        call = call_in_memory(mode, size, tensors, due)
        return Plan(call, slots_of(call, names), target)

    for weight, names in product(map(dtype, deployment.weight_dtypes), deployment.misaligned):
        for bias in [weight] if deployment.bias_dtypes is None else map(dtype, deployment.bias_dtypes):
            dtypes = {"x": own, "weight": weight, "bias": bias}
            if mode.is_backward:
                vectors = {"dweight": weight, "dbias": bias}
                for dy, wants in product(map(dtype, deployment.dy_dtypes), deployment.wants or (("dx", *SUMS),)):
                    due = {name: kind for name, kind in vectors.items() if kind is not None and name in wants}
                    if due or "dx" in wants:
                        yield plan({"dy": dy, **dtypes}, names, {"dx": own, **due})
                continue
            for y, saves in product(map(dtype, deployment.y_dtypes), (False, True) if trained else (False,)):
                assert y is not None
                saved = dict.fromkeys(("mean", "rstd") if saves else (), torch.float32)
                yield plan(dtypes, names, {"y": y, **saved})


def trained(modes: Iterable[GroupMode]) -> frozenset[GroupMode]:
    """Return the forward modes of the backward modes among `modes`."""
    return frozenset(replace(mode, direction=Direction.FORWARD) for mode in modes if mode.is_backward)

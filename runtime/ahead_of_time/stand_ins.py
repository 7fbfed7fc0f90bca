"""Calls of stand-ins for tensors: what a deployment's calls come to, without its tensors and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from ..calls.check import check
from ..calls.plan import Plan
from ..codegen.axes import SAME
from ..codegen.families import Kind as Shape
from ..codegen.families import Parameter
from ..codegen.model import Mode
from ..codegen.parameters import BACKWARD, FAMILIES, FORWARD
from ..dtypes import DTYPES, FLOATS, TORCH_DTYPES
from ..errors import ConflictError, ShapeError
from ..kernels.gpu import Target
from ..mode_arguments import arguments_of

# What `compile_keys` takes for a tensor's type: a dtype, x's, or, where a tensor may be left out, that it is.
Kind = torch.dtype | str | None

# Classes of M, each with the tile that it runs on: up to the table's SMALL_M, up to what an i32 counts, and beyond.
FEW, MANY, MOST = "few", "many", "most"
ROWS = (FEW, MANY, MOST)


@dataclass(frozen=True)
class Deployment:
    """What calls of a mode may bring that the mode does not say; see `compile_keys`."""

    weight_dtypes: Sequence[Kind]
    bias_dtypes: Sequence[Kind] | None
    residual_dtypes: Sequence[Kind]
    smooth_dtypes: Sequence[Kind]
    dy_dtypes: Sequence[Kind]
    wants: Sequence[Collection[str]] | None
    row_strides: Sequence[int | None]
    misaligned: Sequence[Collection[str]]
    rows: Sequence[str]

    def __post_init__(self) -> None:
        for name in ("weight_dtypes", "bias_dtypes", "residual_dtypes", "smooth_dtypes", "dy_dtypes"):
            kinds = getattr(self, name) or ()
            absent = " or None (no such tensor)" if name in ("weight_dtypes", "bias_dtypes") else ""
            for kind in kinds:
                if not (kind in FLOATS or kind == SAME or (absent and kind is None)):
                    raise ConflictError(
                        f"{name} has {kind!r}; it takes {', '.join(map(str, FLOATS))}, {SAME!r} (x's dtype){absent}"
                    )
        for word in self.rows:
            if word not in ROWS:
                raise ConflictError(f"rows has {word!r}; it takes some of {', '.join(ROWS)}")
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
    """What calls of a mode come to, one for each combination of what they may bring."""
    biases = (None,) if not mode.norm.centres else deployment.bias_dtypes
    for weight, stride, names in product(deployment.weight_dtypes, deployment.row_strides, deployment.misaligned):
        x = _rows(mode, n, stride)
        misaligned = [_POINTERS[name] for name in names]
        for bias in (weight,) if biases is None else biases:
            kinds = {"weight": weight, "bias": bias}
            if mode.is_backward:
                yield from _backward(mode, x, target, deployment, kinds, misaligned)
            else:
                yield from _forward(mode, x, target, deployment, kinds, misaligned)


def _forward(
    mode: Mode,
    x: torch.Tensor,
    target: Target,
    deployment: Deployment,
    kinds: Mapping[str, Kind],
    misaligned: Collection[str],
) -> Iterator[Plan]:
    residuals = deployment.residual_dtypes if mode.fadd.adds else (None,)
    smooths = deployment.smooth_dtypes if mode.fquant.smooths else (None,)
    for residual, smooth in product(residuals, smooths):
        arguments = arguments_of(mode, _maker(x, {**kinds, "residual": residual, "smooth_scale": smooth}))
        yield Plan(check(FORWARD.functions[mode.norm], arguments), misaligned, target)


def _backward(
    mode: Mode,
    x: torch.Tensor,
    target: Target,
    deployment: Deployment,
    kinds: Mapping[str, Kind],
    misaligned: Collection[str],
) -> Iterator[Plan]:
    due = ["dx"]
    due += [f"d{name}" for name, kind in kinds.items() if kind is not None]
    due += ["dx_bias"] if mode.x_bias else []
    asked = (due,) if deployment.wants is None else deployment.wants
    bias = kinds["bias"]
    for dy, names in product(_dy_kinds(mode, x, deployment), asked):
        wants = [name for name in due if name in names]
        if not wants:
            continue
        arguments = {**arguments_of(mode, _maker(x, {**kinds, "dy": dy})), "wants": wants}
        arguments["bias_dtype"] = None if bias is None else _dtype(bias, x)
        yield Plan(check(BACKWARD.functions[mode.norm], arguments), misaligned, target)


def _dy_kinds(mode: Mode, x: torch.Tensor, deployment: Deployment) -> list[Kind]:
    """The types of dy that calls of a mode may bring; rows that are rounded first need one of 16 bits."""
    types = [_dtype(kind, x) for kind in deployment.dy_dtypes]
    fitting = [
        kind
        for kind, dtype in zip(deployment.dy_dtypes, types, strict=True)
        if mode.cast is mode.cast.of(DTYPES[dtype], mode.dtype_in)
    ]
    if types and not fitting:
        raise ConflictError(
            f"{mode.name} rounds rows to dy's 16 bits, and dy_dtypes has {', '.join(map(str, types))}; "
            "add torch.float16 or torch.bfloat16 to it"
        )
    return fitting


def _maker(x: torch.Tensor, kinds: Mapping[str, Kind]) -> Callable[[Parameter], torch.Tensor | None]:
    """What makes an operand of x: of its type, or of the one that `kinds` has, where None is no operand."""

    def make(parameter: Parameter) -> torch.Tensor | None:
        if parameter.name == "x":
            return x
        kind = kinds.get(parameter.name, torch.float32 if parameter.kind is Shape.PER_ROW else SAME)
        return None if kind is None else _empty(_SHAPES[parameter.kind](x), _dtype(kind, x))

    return make


_SHAPES: Mapping[Shape, Callable[[torch.Tensor], Sequence[int]]] = {
    Shape.ROWS: lambda x: x.shape,
    Shape.VECTOR: lambda x: x.shape[-1:],
    Shape.PER_ROW: lambda x: x.shape[:-1],
}


def _rows(mode: Mode, n: int, stride: int | None) -> torch.Tensor:
    """Two rows, since the stride of one says nothing."""
    if stride is not None and stride < n:
        raise ShapeError(f"row_strides has {stride}, less than N = {n}; it takes N or more, or None for N itself")
    step = n if stride is None else stride
    return _empty((step + n,), TORCH_DTYPES[mode.dtype_in]).as_strided((2, n), (step, 1))


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # Wherever the caller's default device is: planning takes no tensor without memory.
    return torch.empty(shape, dtype=dtype, device="cpu")


def _dtype(kind: Kind, x: torch.Tensor) -> torch.dtype:
    return kind if isinstance(kind, torch.dtype) else x.dtype

"""Random legal training steps of every family, held to the formula, and random calls of the backward functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, product
from typing import Any

import torch

from normforge.calls.outputs import NormGradients
from proving.cases import AXES, IMAGES, LAYOUTS, Case, Tensors, arriving_at, axes, gradients, hold, operands

from ..calling import BACKWARD, BACKWARD_ORACLE, FLOATS, ORACLE
from . import oracle
from .memory import Memory, row_strides
from .problems import CASTS, MOST_ELEMENTS, ROWS, VECTORS, Choose, Kind, Made, Options, draw_leading


def _some(*names: str) -> list[tuple[str, ...]]:
    """Return the ways to take some of several names, each of them in two of three."""
    return [tuple(compress(names, taken)) for taken in product((True, True, False), repeat=len(names))]


# Rows as short as these may be so nearly constant that rounding decides their gradients.
_SHORTEST = 8


def _values(axis: str, k: Kind) -> tuple[Any, ...]:
    values = axes(k.family).get(axis, (None,))
    if axis == "group_size":
        return tuple(size for size in values if size is None or max(k.n, _SHORTEST) % size == 0)
    # A sum of 16 bits loses more than the gradients may be off, and every weight is offset or none.
    usual = axis == "residual" or (axis == "weight_offset" and {"weight", "next_weight"} & {*k.without})
    return values[:1] if usual else values


def _case(k: Kind) -> Case:
    case = Case(k.family, tuple((axis, getattr(k, axis)) for axis in axes(k.family)))
    return case.but(**{axis: values[0] for axis, values in axes(k.family).items() if not case.has(axis)})


# Training steps of every family: the values on its axes, what is trained, and how gradients lie and where they arrive.
STEPS: Options = {
    "family": lambda k: tuple(AXES),
    **{axis: partial(_values, axis) for axis in dict.fromkeys(axis for family in AXES for axis in axes(family))},
    "trained": lambda k: _some(*(row.name for row in _case(k).rows)),
    "gradient": lambda k: ("contiguous", "offset", "gapped", "transposed", "channels last"),
    "through": lambda k: ((0, 1), (0,), (1,)),
}


@dataclass(frozen=True)
class Step:
    """A training step: a kind, x's shape without what is normalised, and the seed of the values."""

    kind: Kind
    leading: tuple[int, ...]
    seed: int

    @property
    def case(self) -> Case:
        """The step's case of the table of differentiable calls; of images the table has the shapes, too."""
        case = _case(self.kind)
        # A sample of modulated rows is along a dimension.
        leading = self.leading or ((1,) if case.family == "modulated" else ())
        return case if case.family in IMAGES else case.but(shape=(*leading, max(self.kind.n, _SHORTEST)))

    def made(self, device: torch.device) -> MadeStep:
        """Its tensors, on a device."""
        return MadeStep(self, device)


def draw_step(choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int = MOST_ELEMENTS) -> Step:
    """A random step of a kind; of at most so many elements."""
    return Step(kind, draw_leading(choose, kind, shapes, most), choose(range(1 << 16)))


Results = tuple[tuple[torch.Tensor, ...], Tensors]


class MadeStep(Made):
    """A training step's operands, whose memory is watched."""

    def __init__(self, step: Step, device: torch.device) -> None:
        super().__init__(step, device)
        self._case, self._kind = step.case, step.kind
        self._given = operands(self._case, str(device), step.seed)
        for name, tensor in self._given.items():
            tensor.requires_grad_(name in step.kind.trained)
        self._before = self._bytes()

    def _bytes(self) -> Tensors:
        """All memory that operands lie in, gaps too."""
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return {name: empty.clone().set_(tensor.untyped_storage()).clone() for name, tensor in self._given.items()}

    def _arriving(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        lie = LAYOUTS[self._kind.gradient]
        return [lie(dy) if at in self._kind.through else None for at, dy in enumerate(arriving_at(outputs))]

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The outputs."""
        return self._case.run(self._given)

    def backward(self, outputs: Sequence[torch.Tensor]) -> Tensors:
        """The gradients of what is trained."""
        return gradients(outputs, self._given, self._arriving(outputs))

    def run(self) -> Results:
        """The outputs, and the gradients of what is trained."""
        outputs = self.forward()
        return outputs, self.backward(outputs)

    def check_untouched(self, *, refused: bool = False) -> None:
        """Look at all memory that operands lie in."""
        now = self._bytes()
        assert not [name for name, before in self._before.items() if not torch.equal(now[name], before)]

    def _check(self, output: Results) -> None:
        outputs, found = output
        hold(self._case, self._given, outputs, self._arriving(outputs), found)


def _wants(k: Kind) -> list[tuple[str, ...]]:
    possible = {"dx": True, "dweight": k.weight, "dbias": k.norm == "layer", "dx_bias": k.x_bias}
    return [wants or ("dx",) for wants in _some(*(name for name, there in possible.items() if there))]


# Calls of the backward functions.
BACKWARD_CALLS: Options = {
    "norm": lambda k: ("layer", "rms"),
    "weight": lambda k: (None, *VECTORS),
    "x_bias": lambda k: (*[None] * 10, *VECTORS),
    "x": lambda k: ROWS,
    "dy": lambda k: (*ROWS, *[None] * 4),
    "dresidual_out": lambda k: (*[None] * len(ROWS), *ROWS),
    "dx_dtype": lambda k: (None, *FLOATS),
    "bias_dtype": lambda k: (None, *FLOATS) if k.norm == "layer" else (None,),
    "wants": _wants,
    "cast": lambda k: CASTS,
}


@dataclass(frozen=True)
class BackwardCall:
    """A call of a backward function: a kind, x's shape without N, the offset, and the seed of the values."""

    kind: Kind
    leading: tuple[int, ...]
    weight_offset: float
    seed: int

    def made(self, device: torch.device) -> MadeBackward:
        """Its tensors, on a device."""
        return MadeBackward(self, device)


class MadeBackward(Made):
    """The tensors of a call of a backward function in memory that is watched."""

    def __init__(self, call: BackwardCall, device: torch.device) -> None:
        super().__init__(call, device)
        kind, n, shape = call.kind, self._n, (*call.leading, self._n)
        generator = torch.Generator(device).manual_seed(call.seed)
        for name in ("x", "dy", "dresidual_out", "weight", "x_bias"):
            operand = getattr(kind, name)
            if operand is not None:
                size = (n,) if name in ("weight", "x_bias") else shape
                values = torch.randn(size, generator=generator, device=device)
                self._memories[name] = operand.memory(size, device, values)
        self._given: dict[str, Any] = {name: memory.view for name, memory in self._memories.items()}
        saved = ORACLE[kind.norm](self._given["x"], x_bias=self._given.get("x_bias"), save_mv=True)
        for name, statistic in (("mean", saved.mean), ("rstd", saved.rstd)):
            if statistic is not None:
                strides = row_strides(call.leading, 1)
                self._memories[name] = Memory(call.leading, strides, torch.float32, device, 0, statistic)
                self._given[name] = self._memories[name].view
        self._given |= {"cast": kind.cast} | ({} if kind.norm == "layer" else {"weight_offset": call.weight_offset})

    def run(self) -> NormGradients:
        """The call."""
        kind = self._problem.kind
        dtypes = {"dx_dtype": kind.dx_dtype} | ({"bias_dtype": kind.bias_dtype} if kind.norm == "layer" else {})
        return BACKWARD[kind.norm](**{"dy": None, **self._given}, wants=kind.wants, **dtypes)

    def _check(self, output: NormGradients) -> None:
        kind, x = self._problem.kind, self._given["x"]
        want = BACKWARD_ORACLE[kind.norm](**{"dy": torch.zeros_like(x), **self._given})
        dtypes = {"dx": kind.dx_dtype or x.dtype, "dbias": kind.bias_dtype or (kind.weight or kind.x).dtype}
        dtypes |= {f"d{name}": operand.dtype for name in ("weight", "x_bias") if (operand := getattr(kind, name))}
        for name, gradient in output._asdict().items():
            assert (gradient is not None) == (name in kind.wants), f"{name} is {gradient}; wanted were {kind.wants}"
            if gradient is not None:
                # Every sum is along rows, or along rows and then down them.
                chain = oracle.depth(self._n) + (0 if name == "dx" else self._m)
                value, error = getattr(want, name), oracle.U * chain * want.magnitudes[name]
                if name == "dweight" and want.open is not None:
                    error = error + want.open
                found = gradient.shape, gradient.dtype
                assert found == (value.shape, dtypes[name]), f"{name} is of {found}"
                oracle.hold(name, gradient, oracle.Bounded(value, error))


def draw_backward(
    choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int = MOST_ELEMENTS
) -> BackwardCall:
    """A random call of a kind; of at most so many elements."""
    leading = draw_leading(choose, kind, shapes, most)
    offsets = (0.0, 1.0, -0.5) if kind.norm == "rms" and kind.weight else (0.0,)
    return BackwardCall(kind, leading, choose(offsets), choose(range(1 << 16)))

"""Random legal training steps through one norm, and random calls of the backward functions, held to the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress, product
from typing import Any

import torch

from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from proving.cases import LAYOUTS, Case, Tensors, axes, cases, check, gradients, operands

from . import oracle
from .memory import Memory, row_strides
from .problems import CASTS, FLOATS, ROWS, VECTORS, Choose, Kind, Options


def _some(*names: str) -> list[tuple[str, ...]]:
    """Return the ways to take some of several names, each of them in two of three."""
    return [tuple(compress(names, taken)) for taken in product((True, True, False), repeat=len(names))]


@cache
def _cases(family: str) -> tuple[Case, ...]:
    """Return every case of a family, of any shape."""
    return tuple(cases(family, vary=[axis for axis in axes(family) if axis != "shape"]))


def _arriving(k: Kind) -> list[tuple[bool, ...]]:
    """Return for which outputs gradients may arrive: for the sum alone if what is summed is trained."""
    if "residual" not in k.operands or k.family == "added":
        return [(True,)]
    return [(True, True), (True, False), *([(False, True)] if {"x", "residual"} & {*k.trained} else [])]


# Training steps: cases of `proving.cases`, operands that are trained, and outputs that gradients arrive for. Of rows
# shorter than this the rounding of a sum may decide what they are.
_SHORTEST = 31
STEPS: Options = {
    "n": lambda k: (max(k.n, _SHORTEST),),
    "family": lambda k: ("plain", "added", "modulated", "gated"),
    "case": lambda k: [case for case in _cases(k.family) if k.n % (case["group_size"] or 1) == 0],
    "operands": lambda k: [tuple(row.name for row in k.case.rows)],
    "trained": lambda k: [names for names in _some(*k.operands) if names],
    "arriving": _arriving,
    "gradients": lambda k: ("contiguous", "gapped", "offset", "transposed", "expanded"),
}


@dataclass(frozen=True)
class Step:
    """A training step: a kind, x's shape without N, and the seed of the values."""

    kind: Kind
    leading: tuple[int, ...]
    seed: int

    @property
    def case(self) -> Case:
        """The case of the step's shape."""
        case: Case = self.kind.case
        return case.but(shape=(*(self.leading or (1,)), self.kind.n))

    def operands(self, device: torch.device) -> Tensors:
        """Return the operands, of which some require gradients."""
        given = operands(self.case, str(device), self.seed)
        return {name: tensor.requires_grad_(name in self.kind.trained) for name, tensor in given.items()}

    def arriving(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients that arrive at the outputs, laid out as the kind says."""
        drawn = [torch.randn_like(output) for output in outputs]
        laid_out = [LAYOUTS[self.kind.gradients](each) if each.numel() else each for each in drawn]
        return [each if arrives else None for each, arrives in zip(laid_out, self.kind.arriving, strict=True)]

    def run(self, device: torch.device) -> None:
        """Take the step, and drop its results."""
        given = self.operands(device)
        outputs = self.case.run(given)
        gradients(outputs, given, self.arriving(outputs))

    def check(self, device: torch.device) -> None:
        """Take the step, and hold it to the formula, and all operands to what they were.

        Raises:
            AssertionError: something is wrong.
        """
        given = self.operands(device)
        before = {name: tensor.detach().clone() for name, tensor in given.items()}
        self.hold(given, self.case.run(given))
        assert all(torch.equal(before[name], tensor) for name, tensor in given.items()), f"{self} wrote an operand"

    def hold(self, given: Tensors, outputs: tuple[torch.Tensor, ...]) -> None:
        """Hold outputs, and the gradients that follow, to the formula.

        Raises:
            AssertionError: something is wrong.
        """
        try:
            check(self.case, given, self.arriving(outputs), lambda _: outputs)
        except AssertionError as error:
            raise AssertionError(f"{error}\nin {self}") from None


def draw_step(choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int) -> Step:
    """Draw a step of a kind; of at most so many elements."""
    leading = choose(shapes)
    if math.prod(leading) * kind.n > most:
        leading = (most // kind.n,)
    return Step(kind, leading, choose(range(1 << 16)))


_BACKWARD: dict[str, Callable[..., Any]] = {"layer": layernorm2d_bwd, "rms": rmsnorm2d_bwd}


def _wants(k: Kind) -> list[tuple[str, ...]]:
    possible = {"dx": True, "dweight": k.weight, "dbias": k.norm == "layer", "dx_bias": k.x_bias}
    return [wants or ("dx",) for wants in _some(*(name for name, there in possible.items() if there))]


# Calls of the backward functions.
BACKWARD: Options = {
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

    def run(self, device: torch.device) -> None:
        """Run it, and hold the gradients to the oracle and all memory to what it was.

        Raises:
            AssertionError: something is wrong.
        """
        try:
            self._check(device)
        except AssertionError as error:
            raise AssertionError(f"{error}\nin {self}") from None

    def _check(self, device: torch.device) -> None:
        kind, n, m, centres = self.kind, self.kind.n, math.prod(self.leading), self.kind.norm == "layer"
        generator = torch.Generator(device).manual_seed(self.seed)
        shape = (*self.leading, n)
        memories = {}
        for name in ("x", "dy", "dresidual_out", "weight", "x_bias"):
            operand = getattr(kind, name)
            if operand is not None:
                size = (n,) if name in ("weight", "x_bias") else shape
                values = torch.randn(size, generator=generator, device=device)
                memories[name] = operand.memory(size, device, values)
        tensors = {name: memory.view for name, memory in memories.items()}
        s = oracle.total(tensors["x"], tensors.get("x_bias"), None).reshape(m, n)
        saved = oracle.statistics(s, centres, 1e-5)
        mean, rstd = (bounded.value.flatten().float() for bounded in (saved.mean, saved.rstd))
        for name, statistic in (("mean", mean), ("rstd", rstd)):
            strides = row_strides(self.leading, 1)
            memories[name] = Memory(self.leading, strides, torch.float32, device, 0, statistic.reshape(self.leading))
        given = {name: memories[name].view for name in ("rstd", *(("mean",) if centres else ()))}
        given |= {name: tensors[name] for name in ("x_bias", "dresidual_out") if name in tensors}
        given |= {"bias_dtype": kind.bias_dtype} if centres else {"weight_offset": self.weight_offset}
        got = _BACKWARD[kind.norm](
            tensors.get("dy"),
            tensors["x"],
            tensors.get("weight"),
            cast=kind.cast,
            dx_dtype=kind.dx_dtype,
            wants=kind.wants,
            **given,
        )
        for name, memory in memories.items():
            memory.check(name)
        rows = _given_statistics(s, mean, rstd)
        _, factor = oracle.affine(rows.h, tensors.get("weight"), None, self.weight_offset)
        dy, dresidual_out = (
            tensors[name].reshape(m, n) if name in tensors else None for name in ("dy", "dresidual_out")
        )
        dy = torch.zeros_like(s) if dy is None else dy
        weighted = oracle.rounded_first(rows.h, kind.cast, dy.dtype, kind.x.dtype)
        want = oracle.gradients(rows, dy, factor, dresidual_out, centres, weighted)
        bias_dtype = kind.bias_dtype or (kind.weight or kind.x).dtype
        dtypes = {"dx": kind.dx_dtype or kind.x.dtype, "dbias": bias_dtype}
        dtypes |= {f"d{name}": operand.dtype for name in ("weight", "x_bias") if (operand := getattr(kind, name))}
        for name, gradient in got._asdict().items():
            assert (gradient is not None) == (name in kind.wants), f"{name} is {gradient}; wanted were {kind.wants}"
            if gradient is not None:
                size = shape if name == "dx" else (n,)
                assert (gradient.shape, gradient.dtype) == (size, dtypes[name]), f"{name} is in {gradient.dtype}"
                oracle.hold(name, gradient.reshape(m, n) if name == "dx" else gradient, getattr(want, name))


def _given_statistics(s: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> oracle.Statistics:
    """Rows whose mean and rstd a call is given as they are."""
    means, rstds = mean.double().unsqueeze(-1), rstd.double().unsqueeze(-1)
    h = (s.double() - means) * rstds
    none = torch.zeros_like(means)
    exact = oracle.Bounded(h, 3 * oracle.U * h.abs())
    return oracle.Statistics(
        oracle.Bounded(means, none), oracle.Bounded(rstds, none), exact, torch.ones_like(mean, dtype=torch.bool)
    )


def draw_backward(choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int) -> BackwardCall:
    """A random call of a kind; of at most so many elements."""
    leading = choose(shapes)
    if math.prod(leading) * kind.n > most:
        leading = (most // kind.n,)
    offsets = (0.0, 1.0, -0.5) if kind.norm == "rms" and kind.weight else (0.0,)
    return BackwardCall(kind, leading, choose(offsets), choose(range(1 << 16)))

"""Random legal training steps through one norm, and random calls of the backward functions, held to the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import normforge
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd

from . import oracle
from .memory import Memory
from .problems import FLOATS, OFFSETS, ROW_STRIDES, Choose, Operand


def _adjoining(shape: Sequence[int], step: int = 1) -> tuple[int, ...]:
    return tuple(step * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _swapped(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) < 3:
        return _adjoining(shape)
    step = math.prod(shape[2:])
    return (step, shape[0] * step, *_adjoining(shape[2:]))


# Strides of a shape. What kernels cannot walk the functions copy.
LAYOUTS: dict[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
    "contiguous": _adjoining,
    "gapped": lambda shape: (*_adjoining((*shape[:-1], shape[-1] + 3))[:-1], 1),
    "stepped": lambda shape: _adjoining(shape, 2),
    "heads": lambda shape: (math.prod(shape[1:]) * 3 if len(shape) > 1 else 1, *_adjoining(shape)[1:]),
    "transposed heads": _swapped,
    "transposed": lambda shape: tuple(reversed(_adjoining(tuple(reversed(shape))))),
    "expanded": lambda shape: (0, *_adjoining(shape)[1:]),
    "one value": lambda shape: (0,) * len(shape),
}


@dataclass(frozen=True)
class Strided:
    """A tensor's type and layout."""

    dtype: torch.dtype
    layout: str = "contiguous"
    offset: int = 0

    def memory(self, shape: Sequence[int], device: torch.device, values: torch.Tensor) -> Memory:
        """A tensor like this that holds values."""
        return Memory(shape, LAYOUTS[self.layout](shape), self.dtype, device, self.offset, values.to(self.dtype))


_ANY = tuple(Strided(*parts) for parts in product(FLOATS, LAYOUTS, (0, 0, 1)) if parts[1] != "one value")
_GRADIENTS = tuple(Strided(*parts) for parts in product(FLOATS, LAYOUTS, (0, 0, 1)))
_PARAMETERS = tuple(Strided(dtype, "contiguous", offset) for dtype, offset in product(FLOATS, (0, 0, 1)))
_CASTS = ("after_weight", "after_weight", "before_weight")
_EPSILONS = (1e-5, 1e-6, 1e-3)


@dataclass(frozen=True)
class StepKind:
    """All of a training step that may decide which kernels run, M aside.

    Attributes:
        norm: "layer" or "rms".
        entry: "function" or "module".
        normalized: normalized_shape.
        x: x's type and layout.
        residual: the residual's; None for no fused add.
        weight: weight's; None for none.
        bias: likewise.
        trained: which of the tensors require a gradient.
        through: which outputs a gradient arrives for.
        dy: its type and layout.
        dresidual_out: likewise.
        cast: when rows are rounded.
    """

    norm: str
    entry: str
    normalized: tuple[int, ...]
    x: Strided
    residual: Strided | None
    weight: Strided | None
    bias: Strided | None
    trained: tuple[str, ...]
    through: tuple[str, ...]
    dy: Strided
    dresidual_out: Strided
    cast: str


def draw_step_kind(choose: Choose, lengths: Sequence[int]) -> StepKind:
    """A random legal kind of training step."""
    norm, entry, n = choose(("layer", "rms")), choose(("function", "module")), choose(lengths)
    adds = choose((False, True))
    residual = choose(_ANY) if adds else None
    splits = [(n,)] if adds and entry == "function" else [(n,), (n,), *[(a, n // a) for a in (1, 2, 3) if n % a == 0]]
    weight = choose((None, *_PARAMETERS))
    bias = choose((None, *_PARAMETERS)) if norm == "layer" else None
    operands = {"x": True, "residual": residual, "weight": weight, "bias": bias}
    trained = tuple(name for name, there in operands.items() if there and choose((True, True, False)))
    rows_trained = {"x", "residual"} & set(trained)
    through = choose((("y",), ("y", "residual_out"), ("residual_out",))) if adds and rows_trained else ("y",)
    return StepKind(
        norm=norm,
        entry=entry,
        normalized=choose(splits),
        x=choose(_ANY),
        residual=residual,
        weight=weight,
        bias=bias,
        trained=trained,
        through=through,
        dy=choose(_GRADIENTS),
        dresidual_out=choose(_GRADIENTS),
        # A module with this option has a result of its own type.
        cast=choose(_CASTS) if entry == "function" else "after_weight",
    )


@dataclass(frozen=True)
class Step:
    """A training step: a kind, x's shape without what is normalised, eps, and the seed of the values."""

    kind: StepKind
    leading: tuple[int, ...]
    eps: float
    seed: int

    def made(self, device: torch.device) -> MadeStep:
        """Its tensors, on a device."""
        return MadeStep(self, device)

    def run(self, device: torch.device) -> None:
        """The step, its results dropped."""
        made = self.made(device)
        made.backward(made.forward())


def draw_step(choose: Choose, kind: StepKind, shapes: Sequence[tuple[int, ...]], most: int) -> Step:
    """A random step of a kind; of at most so many elements."""
    leading, n = choose(shapes), math.prod(kind.normalized)
    if math.prod(leading) * n > most:
        leading = (most // n,)
    return Step(kind, leading, choose(_EPSILONS), choose(range(1 << 16)))


_FUNCTIONS: dict[tuple[str, bool], Callable[..., Any]] = {
    ("layer", False): normforge.layer_norm,
    ("layer", True): normforge.add_layer_norm,
    ("rms", False): normforge.rms_norm,
    ("rms", True): normforge.add_rms_norm,
}
_MODULES: dict[tuple[str, bool], Callable[..., torch.nn.Module]] = {
    ("layer", False): normforge.LayerNorm,
    ("layer", True): normforge.AddLayerNorm,
    ("rms", False): normforge.RMSNorm,
    ("rms", True): normforge.AddRMSNorm,
}


class MadeStep:
    """A training step's tensors in memory that is watched."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step = step
        kind, self._device = step.kind, device
        self._generator = torch.Generator(device).manual_seed(step.seed)
        self._shape = (*step.leading, *kind.normalized)
        self._m, self._n = math.prod(step.leading), math.prod(kind.normalized)
        shapes = {"x": self._shape, "residual": self._shape, "weight": kind.normalized, "bias": kind.normalized}
        operands = {name: getattr(kind, name) for name in shapes}
        self._memories = {
            name: operand.memory(shapes[name], device, self._random(shapes[name]))
            for name, operand in operands.items()
            if operand is not None
        }
        self.tensors = {
            name: memory.view.detach().requires_grad_(name in kind.trained) for name, memory in self._memories.items()
        }
        for name in kind.through:
            gradient = kind.dy if name == "y" else kind.dresidual_out
            self._memories[f"d{name}"] = gradient.memory(self._shape, device, self._random(self._shape))

    def _random(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self._generator, device=self._device)

    def forward(self) -> dict[str, torch.Tensor]:
        """y, and residual_out where there is a residual."""
        step, kind, tensors = self.step, self.step.kind, self.tensors
        adds = kind.residual is not None
        rows = [tensors["x"], tensors["residual"]] if adds else [tensors["x"]]
        if kind.entry == "module":
            module = _MODULES[kind.norm, adds](kind.normalized, step.eps)
            for name in ("weight", "bias") if kind.norm == "layer" else ("weight",):
                tensor = tensors.get(name)
                parameter = None if tensor is None else torch.nn.Parameter(tensor.detach(), name in kind.trained)
                setattr(module, name, parameter)
                if parameter is not None:
                    tensors[name] = parameter
            got = module(*rows)
        else:
            affine = [tensors.get("weight"), tensors.get("bias")] if kind.norm == "layer" else [tensors.get("weight")]
            shape = [] if adds else [kind.normalized]
            got = _FUNCTIONS[kind.norm, adds](*rows, *shape, *affine, step.eps, cast=kind.cast)
        return {"y": got[0], "residual_out": got[1]} if adds else {"y": got}

    def backward(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """The gradients of what is trained."""
        kind = self.step.kind
        if not kind.trained:
            return {}
        through = [outputs[name] for name in kind.through]
        arriving = [self._memories[f"d{name}"].view for name in kind.through]
        wanted = [self.tensors[name] for name in kind.trained]
        return dict(zip(kind.trained, torch.autograd.grad(through, wanted, arriving, allow_unused=True), strict=True))

    def check(self, outputs: dict[str, torch.Tensor], found: dict[str, torch.Tensor | None]) -> None:
        """Hold outputs and gradients to the oracle, and all memory to what it was.

        Args:
            outputs: of `forward`.
            found: the gradients.

        Raises:
            AssertionError: something is wrong.
        """
        try:
            for name, memory in self._memories.items():
                memory.check(name)
            self._check_values(outputs, found)
        except AssertionError as error:
            raise AssertionError(f"{error}\nin {self.step}") from None

    def _check_values(self, outputs: dict[str, torch.Tensor], found: dict[str, torch.Tensor | None]) -> None:
        kind, m, n, centres = self.step.kind, self._m, self._n, self.step.kind.norm == "layer"
        y, residual_out = outputs["y"], outputs.get("residual_out")
        expected = self.tensors["x"].dtype
        assert (y.shape, y.dtype) == (self._shape, expected), f"y is {tuple(y.shape)} in {y.dtype}, not {expected}"
        assert y.requires_grad == bool(kind.trained), f"y.requires_grad is {y.requires_grad}"
        weight, bias = (self._vector(name) for name in ("weight", "bias"))
        with torch.no_grad():
            residual = self.tensors.get("residual")
            s = oracle.total(self.tensors["x"], None, residual).reshape(m, n)
            stored = None
            if residual_out is not None and residual is not None:
                stored = s.to(residual.dtype)
                assert torch.equal(residual_out.reshape(m, n), stored), "residual_out is not x + residual, rounded once"
                s = stored.float()
            if m:
                rows = oracle.statistics(s, centres, self.step.eps)
                h = oracle.rounded_first(rows.h, kind.cast, y.dtype, self.tensors["x"].dtype)
                value, _ = oracle.affine(h, weight, bias, 0.0)
                oracle.hold("y", y.reshape(m, n), value, rows.determined)
            rows = oracle.statistics(s, centres, self.step.eps)
            _, factor = oracle.affine(rows.h, weight, bias, 0.0)
            # Autograd brings what arrives into the output's own type.
            arriving = {
                name: self._memories[f"d{name}"].view.to(outputs[name].dtype).reshape(m, n) for name in kind.through
            }
            dy = arriving.get("y", torch.zeros_like(s))
            # Rows that are read again are of the sum's type; of fp32 alone nothing was rounded.
            read = self.tensors["x"] if stored is None else stored
            fp32 = y.dtype is self.tensors["x"].dtype is torch.float32
            weighted = rows.h if fp32 else oracle.rounded_first(rows.h, kind.cast, y.dtype, read.dtype)
            want = oracle.gradients(rows, dy, factor, arriving.get("residual_out"), centres, weighted)
            bounds = {"x": want.dx, "residual": want.dx, "weight": want.dweight, "bias": want.dbias}
            for name, gradient in found.items():
                tensor = self.tensors[name]
                if gradient is None:
                    assert name in ("weight", "bias"), f"d{name} is None"
                    assert "y" not in kind.through, f"d{name} is None"
                    continue
                assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype), f"d{name}: {gradient.dtype}"
                flat = gradient.reshape(-1) if name in ("weight", "bias") else gradient.reshape(m, n)
                oracle.hold(f"d{name}", flat, bounds[name])

    def _vector(self, name: str) -> torch.Tensor | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else tensor.detach().reshape(-1)


_ROWS = tuple(Operand(*parts) for parts in product(FLOATS, ROW_STRIDES, OFFSETS))
_VECTORS = tuple(Operand(dtype, offset=offset) for dtype, offset in product(FLOATS, OFFSETS))
_BACKWARD: dict[str, Callable[..., Any]] = {"layer": layernorm2d_bwd, "rms": rmsnorm2d_bwd}


@dataclass(frozen=True)
class BackwardKind:
    """All of a call of a backward function that may decide which kernels run, M aside; see `layernorm2d_bwd`."""

    norm: str
    n: int
    x: Operand
    dy: Operand | None
    dresidual_out: Operand | None
    weight: Operand | None
    x_bias: Operand | None
    dx_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    wants: tuple[str, ...]
    cast: str


def draw_backward_kind(choose: Choose, lengths: Sequence[int]) -> BackwardKind:
    """A random legal kind of backward call."""
    norm, n = choose(("layer", "rms")), choose(lengths)
    weight, x_bias = choose((None, *_VECTORS)), choose((*(None,) * 10, *_VECTORS))
    possible = {"dx": True, "dweight": weight, "dbias": norm == "layer", "dx_bias": x_bias}
    return BackwardKind(
        norm=norm,
        n=n,
        x=choose(_ROWS),
        dy=choose((*_ROWS, *(None,) * 4)),
        dresidual_out=choose((None, choose(_ROWS))),
        weight=weight,
        x_bias=x_bias,
        dx_dtype=choose((None, *FLOATS)),
        bias_dtype=choose((None, *FLOATS)) if norm == "layer" else None,
        wants=tuple(name for name, there in possible.items() if there and choose((True, True, False))) or ("dx",),
        cast=choose(_CASTS),
    )


@dataclass(frozen=True)
class BackwardCall:
    """A call of a backward function: a kind, x's shape without N, the offset, and the seed of the values."""

    kind: BackwardKind
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
            strides = _adjoining(self.leading)
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


def draw_backward(choose: Choose, kind: BackwardKind, shapes: Sequence[tuple[int, ...]], most: int) -> BackwardCall:
    """A random call of a kind; of at most so many elements."""
    leading = choose(shapes)
    if math.prod(leading) * kind.n > most:
        leading = (most // kind.n,)
    offsets = (0.0, 1.0, -0.5) if kind.norm == "rms" and kind.weight else (0.0,)
    return BackwardCall(kind, leading, choose(offsets), choose(range(1 << 16)))

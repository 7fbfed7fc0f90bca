"""Random legal training steps through one norm, and random calls of the backward functions, held to the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, product
from typing import Any

import torch

import normforge
from normforge.calls.outputs import NormGradients

from ..calls.shared import BACKWARD
from . import oracle
from .memory import Memory, row_strides
from .problems import (
    CASTS,
    FLOATS,
    LAYOUTS,
    MOST_ELEMENTS,
    ROWS,
    VECTORS,
    Choose,
    Kind,
    Made,
    Operand,
    Options,
    draw_leading,
)

_GRADIENTS = tuple(Operand(*parts) for parts in product(FLOATS, LAYOUTS, (0, 0, 1)))
_ANY = tuple(operand for operand in _GRADIENTS if operand.rows != "one value")
_PARAMETERS = tuple(Operand(dtype, offset=offset) for dtype, offset in product(FLOATS, (0, 0, 1)))
_EPSILONS = (1e-5, 1e-6, 1e-3)


def _some(*names: str) -> list[tuple[str, ...]]:
    """Return the ways to take some of several names, each of them in two of three."""
    return [tuple(compress(names, taken)) for taken in product((True, True, False), repeat=len(names))]


def _there(k: Kind) -> list[str]:
    return ["x", *(name for name in ("residual", "weight", "bias") if getattr(k, name))]


def _shapes(k: Kind) -> list[tuple[int, ...]]:
    """What is normalised: the last dimension, and in some calls the last two."""
    if k.residual and k.entry == "function":
        return [(k.n,)]
    return [(k.n,), (k.n,), *[(a, k.n // a) for a in (1, 2, 3) if k.n % a == 0]]


# Training steps: what is called, the operands, which of them are trained, and the outputs that gradients arrive for.
STEPS: Options = {
    "norm": lambda k: ("layer", "rms"),
    "entry": lambda k: ("function", "module"),
    "residual": lambda k: (*[None] * len(_ANY), *_ANY),
    "weight": lambda k: (None, *_PARAMETERS),
    "bias": lambda k: (None, *_PARAMETERS) if k.norm == "layer" else (None,),
    "x": lambda k: _ANY,
    "normalized": _shapes,
    "trained": lambda k: _some(*_there(k)),
    "through": lambda k: (
        (("y",), ("y", "residual_out"), ("residual_out",))
        if k.residual and {"x", "residual"} & {*k.trained}
        else (("y",),)
    ),
    "dy": lambda k: _GRADIENTS,
    "dresidual_out": lambda k: _GRADIENTS,
    # A module with this option has a result of its own type.
    "cast": lambda k: CASTS if k.entry == "function" else CASTS[:1],
}


@dataclass(frozen=True)
class Step:
    """A training step: a kind, x's shape without what is normalised, eps, and the seed of the values."""

    kind: Kind
    leading: tuple[int, ...]
    eps: float
    seed: int

    def made(self, device: torch.device) -> MadeStep:
        """Its tensors, on a device."""
        return MadeStep(self, device)


def draw_step(choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int = MOST_ELEMENTS) -> Step:
    """A random step of a kind; of at most so many elements."""
    return Step(kind, draw_leading(choose, kind, shapes, most), choose(_EPSILONS), choose(range(1 << 16)))


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


Results = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]


class MadeStep(Made):
    """A training step's tensors in memory that is watched."""

    def __init__(self, step: Step, device: torch.device) -> None:
        super().__init__(step, device)
        self.step, kind = step, step.kind
        self._generator = torch.Generator(device).manual_seed(step.seed)
        self._shape = (*step.leading, *kind.normalized)
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

    def run(self) -> Results:
        """The outputs, and the gradients of what is trained."""
        outputs = self.forward()
        return outputs, self.backward(outputs)

    def _check(self, output: Results) -> None:
        outputs, found = output
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
        self.call, kind, n = call, call.kind, call.kind.n
        self._centres = kind.norm == "layer"
        generator = torch.Generator(device).manual_seed(call.seed)
        for name in ("x", "dy", "dresidual_out", "weight", "x_bias"):
            operand = getattr(kind, name)
            if operand is not None:
                size = (n,) if name in ("weight", "x_bias") else (*call.leading, n)
                values = torch.randn(size, generator=generator, device=device)
                self._memories[name] = operand.memory(size, device, values)
        self._tensors = {name: memory.view for name, memory in self._memories.items()}
        self._s = oracle.total(self._tensors["x"], self._tensors.get("x_bias"), None).reshape(self._m, n)
        saved = oracle.statistics(self._s, self._centres, 1e-5)
        self._saved = {
            name: bounded.value.flatten().float() for name, bounded in (("mean", saved.mean), ("rstd", saved.rstd))
        }
        for name, statistic in self._saved.items():
            values, strides = statistic.reshape(call.leading), row_strides(call.leading, 1)
            self._memories[name] = Memory(call.leading, strides, torch.float32, device, 0, values)

    def run(self) -> NormGradients:
        """The call."""
        kind, tensors = self.call.kind, self._tensors
        given: dict[str, Any] = {
            name: self._memories[name].view for name in ("rstd", *(("mean",) if self._centres else ()))
        }
        given |= {name: tensors[name] for name in ("x_bias", "dresidual_out") if name in tensors}
        given |= {"bias_dtype": kind.bias_dtype} if self._centres else {"weight_offset": self.call.weight_offset}
        return BACKWARD[kind.norm](
            tensors.get("dy"),
            tensors["x"],
            tensors.get("weight"),
            cast=kind.cast,
            dx_dtype=kind.dx_dtype,
            wants=kind.wants,
            **given,
        )

    def _check(self, output: NormGradients) -> None:
        kind, tensors, m, n, centres, s = self.call.kind, self._tensors, self._m, self._n, self._centres, self._s
        rows = _given_statistics(s, self._saved["mean"], self._saved["rstd"])
        _, factor = oracle.affine(rows.h, tensors.get("weight"), None, self.call.weight_offset)
        dy, dresidual_out = (
            tensors[name].reshape(m, n) if name in tensors else None for name in ("dy", "dresidual_out")
        )
        dy = torch.zeros_like(s) if dy is None else dy
        weighted = oracle.rounded_first(rows.h, kind.cast, dy.dtype, kind.x.dtype)
        want = oracle.gradients(rows, dy, factor, dresidual_out, centres, weighted)
        bias_dtype = kind.bias_dtype or (kind.weight or kind.x).dtype
        dtypes = {"dx": kind.dx_dtype or kind.x.dtype, "dbias": bias_dtype}
        dtypes |= {f"d{name}": operand.dtype for name in ("weight", "x_bias") if (operand := getattr(kind, name))}
        shape = (*self.call.leading, n)
        for name, gradient in output._asdict().items():
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


def draw_backward(
    choose: Choose, kind: Kind, shapes: Sequence[tuple[int, ...]], most: int = MOST_ELEMENTS
) -> BackwardCall:
    """A random call of a kind; of at most so many elements."""
    leading = draw_leading(choose, kind, shapes, most)
    offsets = (0.0, 1.0, -0.5) if kind.norm == "rms" and kind.weight else (0.0,)
    return BackwardCall(kind, leading, choose(offsets), choose(range(1 << 16)))

"""Random inputs for a backward mode, and the check of every gradient against fp64 autograd through the oracle."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from normforge import reference
from normforge.calls.outputs import NormGradients
from normforge.codegen.model import Mode
from normforge.codegen.parameters import BACKWARD
from normforge.codegen.values import DType
from normforge.dtypes import TORCH_DTYPES
from normforge.families import public
from normforge.families.gated import row as gated
from normforge.families.modulated import row as modulated
from normforge.families.operands import GatedArgs, GatedSaved, ModulatedArgs, ModulatedSaved
from normforge.random_mask import dropout_mask, kept_factor
from normforge.tools.compare import TOLERANCES

EPS = 1e-5
DROPOUT_P = 0.3

# fp32 sums of a few thousand terms: rounding errors in units of the sum of the terms' magnitudes.
SUM_ERROR = 2e-6


@dataclass(frozen=True)
class GradientProblem:
    """One backward call: a mode, a shape, and what may vary without another instance.

    Attributes:
        mode: what is computed; x_bias and fadd say which operands there are.
        shape: x's shape, (..., N).
        row_stride: elements from row to row of x and dy; None is N.
        dtypes: tensor name to element type, for those that need not be x's.
        has_weight: whether there is a weight.
        weight_offset: RMSNorm only.
    """

    mode: Mode
    shape: tuple[int, ...]
    row_stride: int | None = None
    dtypes: dict[str, DType] = field(default_factory=dict)
    has_weight: bool = True
    weight_offset: float = 0.0

    def check(self, device: str) -> None:
        """Run the call and hold every gradient against the oracle's."""
        if self.mode.modulated:
            check_modulated(self.mode, self.shape, self.dtypes, device)
            return
        if self.mode.gating.gates:
            check_gated(self.mode, self.shape, self.dtypes, device)
            return
        tensors = self._draw(device)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        expected, scales, mean, rstd = self._oracle(tensors)
        actual = self._run(tensors, mean, rstd)
        for name, want in expected.items():
            got = getattr(actual, name)
            assert got is not None, f"{name} is missing: {self}"
            tolerance = TOLERANCES[got.dtype]
            allowed = tolerance.rtol * want.abs() + scales[name]
            error = (got.double() - want).abs()
            assert bool((error <= allowed).all()), f"{name} is off by {float(error.max()):.3g}: {self}"
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), f"{name} was written to: {self}"

    def wants(self) -> tuple[str, ...]:
        """Every gradient that this call has."""
        names = ["dx"]
        names += ["dweight"] if self.has_weight else []
        names += ["dbias"] if self.mode.norm.centres else []
        names += ["dx_bias"] if self.mode.x_bias else []
        names += ["ddropped"] if self.mode.dropout else []
        return tuple(names)

    def _draw(self, device: str) -> dict[str, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(zlib.crc32(repr(self).encode()))
        n = self.shape[-1]

        def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            dtype = TORCH_DTYPES[self.dtypes.get(name, self.mode.dtype_in)]
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        def draw_rows(name: str) -> torch.Tensor:
            return draw(name, (*self.shape[:-1], self.row_stride or n))[..., :n]

        tensors = {"x": draw_rows("x"), "dy": draw_rows("dy")}
        if self.has_weight:
            tensors["weight"] = draw("weight", (n,))
        if self.mode.x_bias:
            tensors["x_bias"] = draw("x_bias", (n,))
        if self.mode.fadd.stores:
            tensors["dresidual_out"] = draw_rows("dresidual_out")
        if self.mode.dropout:
            tensors["dropout_rng"] = torch.randint(2**63 - 1, (2,), generator=generator, device=device)
        return tensors

    def _run(self, tensors: dict[str, torch.Tensor], mean: torch.Tensor, rstd: torch.Tensor) -> NormGradients:
        operands: dict[str, Any] = {**tensors, "rstd": rstd, "wants": self.wants()}
        if self.mode.cast.comes_first:
            operands["cast"] = self.mode.cast
        if self.mode.dropout:
            operands["dropout_p"] = DROPOUT_P
        operands |= {"mean": mean} if self.mode.norm.centres else {"weight_offset": self.weight_offset}
        gradients: NormGradients = getattr(public, BACKWARD.functions[self.mode.norm])(**operands)
        return gradients

    def _oracle(
        self, tensors: dict[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Gradients in fp64, the error that fp32 sums may have in each, and the statistics a forward call saves."""
        rng = tensors.get("dropout_rng")
        exact = {name: tensor.double().requires_grad_() for name, tensor in tensors.items() if tensor is not rng}
        x, weight, x_bias = exact["x"], exact.get("weight"), exact.get("x_bias")
        bias = torch.zeros_like(x[..., 0, :] if x.dim() > 1 else x).reshape(-1)[: x.shape[-1]].requires_grad_()
        asked: dict[str, Any] = {"eps": EPS, "x_bias": x_bias, "save_mv": True}
        # y has dy's dtype, or else x's: what is rounded to first is the first of 16 bits.
        halves = [dtype for dtype in (tensors["dy"].dtype, tensors["x"].dtype) if dtype.itemsize == 2]
        asked |= {"cast": self.mode.cast, "out_dtype": (*halves, torch.float32)[0]}
        oracle = reference.FORWARD[self.mode.norm]
        own = {"bias": bias} if self.mode.norm.centres else {"weight_offset": self.weight_offset}
        output, unweighted = oracle(x, weight, **own, **asked), oracle(x, **asked)
        assert output.rstd is not None
        loss = (output.z * exact["dy"].detach()).sum()
        if self.mode.fadd.stores:
            total = x if x_bias is None else x + x_bias
            loss = loss + (total * exact["dresidual_out"].detach()).sum()
        leaves = {"dx": x, "dweight": weight, "dbias": bias, "dx_bias": x_bias}
        wanted = {name: leaf for name in self.wants() if (leaf := leaves.get(name)) is not None}
        gradients = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))
        kept = torch.ones_like(x)
        if rng is not None:
            kept = dropout_mask(x.shape, DROPOUT_P, rng) * kept_factor(DROPOUT_P, x.device).double()
            gradients["ddropped"] = gradients["dx"] * kept
            if x_bias is not None:
                gradients["dx_bias"] = gradients["ddropped"].reshape(-1, x.shape[-1]).sum(0)

        dy = exact["dy"].detach().abs()
        g = dy if weight is None else dy * (weight.detach().abs() + abs(self.weight_offset))
        rows = g.amax(-1, keepdim=True) * output.rstd.detach().double().unsqueeze(-1) * 4
        if self.mode.fadd.stores:
            rows = rows + exact["dresidual_out"].detach().abs()
        h = output.z.detach().abs().amax() if weight is None else torch.tensor(6.0, device=x.device)
        columns = dy.flatten(0, -2).sum(0) if dy.dim() > 1 else dy
        scales = {
            "dx": SUM_ERROR * rows,
            "dweight": SUM_ERROR * columns * h + _either(dy, unweighted.open),
            "dbias": SUM_ERROR * columns,
            "dx_bias": SUM_ERROR * (rows * kept).flatten(0, -2).sum(0) if dy.dim() > 1 else rows,
            "ddropped": SUM_ERROR * rows * kept,
        }
        mean = output.mean if output.mean is not None else output.rstd
        return gradients, scales, mean.detach(), output.rstd.detach()


def check_modulated(mode: Mode, shape: tuple[int, ...], dtypes: dict[str, DType], device: str) -> None:
    """Run the kernels of modulated rows, of two samples that each have so many, and hold every gradient to fp64."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{mode.name}{shape}".encode()))
    rows, n = max(8, shape[0]), shape[-1]

    def draw(name: str, *size: int) -> torch.Tensor:
        dtype = TORCH_DTYPES[dtypes.get(name, mode.dtype_in)]
        return torch.randn(size, generator=generator, device=device).to(dtype)

    # What is normalised is of the mode's type: x itself, or a sum that was stored.
    x, dy = draw("x", 2, rows, n), draw("dy", 2, rows, n)
    scale, shift, gate = draw("scale", 2, n), draw("shift", 2, n), draw("gate", 2, n)
    weight, bias = draw("weight", n), draw("bias", n) if mode.norm.centres else None
    gated = draw("gated", 2, rows, n)
    dsum = draw("dresidual_out", 2, rows, n) if mode.fadd.stores else None
    s = x.double()
    mean = s.mean(-1).float() if mode.norm.centres else None
    centre = 0 if mean is None else s.mean(-1, keepdim=True)
    rstd = ((s - centre).square().mean(-1) + EPS).rsqrt().float()
    gates = mode.x_gate
    kept = ModulatedSaved(
        x, scale, shift, gate if gates else None, weight, bias, gated if gates else None,
        None if mean is None else mean.flatten(), rstd.flatten(),
    )  # fmt: skip
    of_x = gated.dtype if gates else x.dtype
    types = (of_x, scale.dtype, shift.dtype, gate.dtype, x.dtype, weight.dtype, None if bias is None else bias.dtype)
    due = (True, True, True, gates, True, True, bias is not None)
    told = ModulatedArgs(mode.norm.value, 0.0, types)
    assert modulated.IN_PARTS.takes(kept, dy, dsum)
    found = modulated.IN_PARTS.gradients(kept, told, (dy, dsum), due)
    exact_kept = ModulatedSaved(*[None if tensor is None else tensor.double() for tensor in kept])  # type: ignore[arg-type] # tensors
    exact_told = told._replace(dtypes=(torch.float64,) * len(types))
    wanted = exactly(exact_kept, exact_told, dy.double(), None if dsum is None else dsum.double())
    for name, got, want in zip(
        ("x", "scale", "shift", "gate", "residual", "weight", "bias"), found, wanted, strict=True
    ):
        assert (got is None) == (want is None or not due[_PLACES.index(name)]), name
        if got is not None and want is not None:
            tolerance = TOLERANCES[got.dtype]
            allowed = tolerance.rtol * want.abs() + 1e-4 * max(1.0, float(want.abs().max()))
            error = (got.double() - want).abs()
            assert got.shape == want.shape, name
            assert bool((error <= allowed).all()), f"gradient of {name} is off by {float(error.max()):.3g}: {mode.name}"


def check_gated(mode: Mode, shape: tuple[int, ...], dtypes: dict[str, DType], device: str) -> None:
    """Run the kernels of gated rows, of groups if the mode has them, and hold every gradient to fp64."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{mode.name}{shape}".encode()))
    groups, n = 3, shape[-1]

    def draw(name: str, *size: int) -> torch.Tensor:
        dtype = TORCH_DTYPES[dtypes.get(name, mode.dtype_in)]
        return torch.randn(size, generator=generator, device=device).to(dtype)

    x, gate, dy = (draw(name, shape[0], groups, n) for name in ("x", "gate", "dy"))
    x = x.to(TORCH_DTYPES[mode.dtype_in])
    of_vectors = (groups, n) if mode.grouped else (n,)
    weight, bias = draw("weight", *of_vectors), draw("bias", *of_vectors) if mode.norm.centres else None
    act = torch.nn.functional.silu if mode.gate_activation.value == "silu" else torch.sigmoid
    s = x.double() * act(gate.double()) if mode.gating.is_before else x.double()
    centre = s.mean(-1, keepdim=True) if mode.norm.centres else torch.zeros_like(s[..., :1])
    rstd = ((s - centre).square().mean(-1) + EPS).rsqrt()
    mean = centre.squeeze(-1).float() if mode.norm.centres else None
    kept = GatedSaved(x, gate, weight, bias, mean, rstd.float())
    leaves = [tensor for tensor in (x, gate, weight, bias) if tensor is not None]
    types = tuple([None if tensor is None else tensor.dtype for tensor in (x, gate, weight, bias)])
    told = GatedArgs(mode.norm.value, mode.gating, mode.gate_activation, 0.0, types)
    assert gated.IN_PARTS.takes(kept, dy)
    found = gated.IN_PARTS.gradients(kept, told, (dy, None), (True, True, True, bias is not None))

    exact = [tensor.double().requires_grad_() for tensor in leaves]
    factor = act(exact[1])
    total = exact[0] * factor if mode.gating.is_before else exact[0]
    centred = total - total.mean(-1, keepdim=True) if mode.norm.centres else total
    y = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt() * exact[2]
    y = y + exact[3] if bias is not None else y
    y = y if mode.gating.is_before else y * factor
    wanted = torch.autograd.grad((y * dy.double()).sum(), exact)
    assert [gradient is not None for gradient in found] == [True, True, True, bias is not None]
    for name, got, want in zip(("x", "gate", "weight", "bias"), found, wanted, strict=False):
        assert got is not None
        allowed = TOLERANCES[got.dtype].rtol * want.abs() + 1e-4 * max(1.0, float(want.abs().max()))
        error = (got.double() - want).abs()
        assert got.shape == want.shape, name
        assert bool((error <= allowed).all()), f"gradient of {name} is off by {float(error.max()):.3g}: {mode.name}"


_PLACES = ("x", "scale", "shift", "gate", "residual", "weight", "bias")


def exactly(
    kept: ModulatedSaved, told: ModulatedArgs, dy: torch.Tensor, dsum: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """The gradients by autograd in fp64, of a norm written out."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in kept[:7]]
    s, scale, shift, gate, weight, bias, gated = leaves
    assert s is not None
    assert scale is not None
    assert shift is not None
    centre = s.mean(-1, keepdim=True) if told.norm == "layer" else 0
    h = (s - centre) * ((s - centre).square().mean(-1, keepdim=True) + EPS).rsqrt()
    a = h if weight is None else h * weight
    a = a if bias is None else a + bias
    y = a * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
    loss = (y * dy).sum() + (0 if dsum is None else (s * dsum).sum())
    there = [t for t in (scale, shift, s, weight, bias) if t is not None]
    of = dict(zip(map(id, there), torch.autograd.grad(loss, there), strict=True))
    ds = of[id(s)]
    dx = ds if gate is None else ds * gate.detach().unsqueeze(1)
    dgate = None if gated is None else (ds * gated.detach()).sum(1)
    return [dx, of[id(scale)], of[id(shift)], dgate, ds, of.get(id(weight)), of.get(id(bias))]


def _either(dy: torch.Tensor, either: torch.Tensor | None) -> torch.Tensor | float:
    """How far off dweight may be where fp32 leaves open which way a row is rounded before the weight."""
    return 0.0 if either is None else (dy * either).reshape(-1, dy.shape[-1]).sum(0)

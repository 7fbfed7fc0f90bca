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
from proving.cases import FAMILIES, Case, Tensors, cases, doubled, formula, gradients, operands

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
    """Run the kernels of modulated rows, of two samples of at least 8 rows each, and hold every gradient to fp64."""
    at = {"shape": (2, max(8, shape[0]), shape[-1]), "without": () if mode.x_gate else ("gate",)}
    (case,) = cases("modulated", vary=(), norm=mode.norm.value, **at)
    given = _drawn(case, mode, dtypes, device)
    # Kernels are passed the sum, whose type is the mode's; the residual is what the formula needs to come to the sum.
    total = given["residual"] = given["residual"].to(TORCH_DTYPES[mode.dtype_in])
    wide = doubled(given)
    added = wide["x"] * wide["gate"].unsqueeze(1) if mode.x_gate else wide["x"]
    wide["residual"] = (total.double() - added).detach().requires_grad_()
    outputs = formula(case, wide)
    dsum = torch.randn_like(total) if mode.fadd.stores else None
    of: dict[str, Any] = (
        given | _statistics(mode, total.double()) | {"x": total, "gated": given["x"] if mode.x_gate else None}
    )
    kept = ModulatedSaved._make(of.get(name) for name in ModulatedSaved._fields)
    told = ModulatedArgs(mode.norm.value, 0.0, _types(case, given))
    _check_in_parts(modulated.IN_PARTS, case, (kept, told), (_dy(mode, outputs[0], dtypes), dsum), outputs, wide)


def check_gated(mode: Mode, shape: tuple[int, ...], dtypes: dict[str, DType], device: str) -> None:
    """Run the kernels of gated rows, of three groups of a token, and hold every gradient to fp64."""
    m, n = shape[0], shape[-1]
    at: dict[str, Any] = {"activation": mode.gate_activation.value, "norm_before_gate": not mode.gating.is_before}
    at |= {"shape": (m, 3 * n), "group_size": n} if mode.grouped else {"shape": (m, 3, n)}
    (case,) = cases("gated", vary=(), norm=mode.norm.value, **at)
    given = _drawn(case, mode, dtypes, device)
    given["x"] = given["x"].to(TORCH_DTYPES[mode.dtype_in])
    wide = doubled(given)
    factor = torch.ones((), device=device)
    if mode.gating.is_before:
        factor = torch.sigmoid(wide["gate"]) * (wide["gate"] if case["activation"] == "silu" else 1)
    outputs = formula(case, wide)
    of: dict[str, Any] = given | _statistics(mode, (wide["x"] * factor).detach().view(m, 3, n))
    if mode.grouped:
        # Kernels are passed groups in a dimension of their own.
        of |= {name: tensor.view(*tensor.shape[:-1], 3, n) for name, tensor in given.items()}
    kept = GatedSaved._make(of.get(name) for name in GatedSaved._fields)
    told = GatedArgs(mode.norm.value, mode.gating, mode.gate_activation, 0.0, _types(case, given))
    dy = _dy(mode, outputs[0], dtypes).view(kept.x.shape)
    _check_in_parts(gated.IN_PARTS, case, (kept, told), (dy, None), outputs, wide)


def _drawn(case: Case, mode: Mode, dtypes: dict[str, DType], device: str) -> Tensors:
    drawn = operands(case, device, zlib.crc32(f"{mode.name}{case}".encode()))
    return {name: tensor.detach().to(TORCH_DTYPES[dtypes.get(name, mode.dtype_in)]) for name, tensor in drawn.items()}


def _dy(mode: Mode, y: torch.Tensor, dtypes: dict[str, DType]) -> torch.Tensor:
    return torch.randn_like(y).to(TORCH_DTYPES[dtypes.get("dy", mode.dtype_in)])


def _names(case: Case) -> list[str]:
    """The operands of a family, in order."""
    return [row.name for row in FAMILIES[case.family].parameters if row.kind.is_tensor and row.functional]


def _types(case: Case, given: Tensors) -> tuple[torch.dtype | None, ...]:
    return tuple(given[name].dtype if name in given else None for name in _names(case))


def _statistics(mode: Mode, rows: torch.Tensor) -> Tensors:
    centre = rows.mean(-1) if mode.norm.centres else torch.zeros_like(rows[..., 0])
    rstd = ((rows - centre.unsqueeze(-1)).square().mean(-1) + EPS).rsqrt()
    found = {"rstd": rstd} | ({"mean": centre} if mode.norm.centres else {})
    return {name: statistic.flatten().float() for name, statistic in found.items()}


def _check_in_parts(
    parts: Any,
    case: Case,
    call: tuple[Any, Any],
    arriving: tuple[torch.Tensor | None, ...],
    outputs: tuple[torch.Tensor, ...],
    wide: Tensors,
) -> None:
    """Run the kernels of a backward pass, and hold every gradient to that of the formula's outputs."""
    ends = [None if dy is None else dy.double().view(y.shape) for y, dy in zip(outputs, arriving, strict=False)]
    wanted = gradients(outputs, wide, ends)
    assert parts.takes(call[0], *arriving)
    found = parts.gradients(*call, arriving, tuple(name in wide for name in _names(case)))
    assert [gradient is not None for gradient in found] == [name in wide for name in _names(case)]
    for got, (name, want) in zip((each for each in found if each is not None), wanted.items(), strict=True):
        allowed = TOLERANCES[got.dtype].rtol * want.abs() + 1e-4 * max(1.0, float(want.abs().max()))
        error = (got.double().view(want.shape) - want).abs()
        assert bool((error <= allowed).all()), f"gradient of {name} is off by {float(error.max()):.3g}: {case}"


def _either(dy: torch.Tensor, either: torch.Tensor | None) -> torch.Tensor | float:
    """How far off dweight may be where fp32 leaves open which way a row is rounded before the weight."""
    return 0.0 if either is None else (dy * either).reshape(-1, dy.shape[-1]).sum(0)

"""The table of differentiable calls by family: operands, formula and comparison, each written once.

`cases.yaml` lists how calls of a family differ. The operands and their shapes follow from the family's rows in
`codegen/parameters.py`. A test asks for a slice of the table, `cases("gated", "group", vary=("norm", "dtype"))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn import functional

import normforge
from normforge.codegen.families import Family, Kind, Parameter
from normforge.codegen.parameters import ADDED, FORWARD, GATED, GROUP, MODULATED, RENORMED, STATISTICS
from normforge.codegen.values import Norm
from normforge.random_mask import dropped

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("plain", "l2", "channels"), FORWARD),
    **{family.name: family for family in (ADDED, RENORMED, MODULATED, GATED, GROUP, STATISTICS)},
}
# The families that add the residual behind a norm.
BEHIND = ("added", "renormed")
# The families of (B, C, ...).
IMAGES = ("group", "channels")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# A norm that lacks some forms is tested in the others alone.
FULL = tuple(norm for norm in Norm if not norm.row.lacks)
EPS = 1e-5
# The seed and the offset of what a dropout draws, unsigned and as int64.
RNG, SIGNED_RNG = (3, 2**63 + 4), torch.tensor([3, 4 - 2**63])


def with_tuples(value: Any) -> Any:
    """Return what YAML holds, with tuples for lists."""
    if isinstance(value, dict):
        return {name: with_tuples(each) for name, each in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


# By family, every way in which its calls differ; the first value is the usual one.
AXES: Mapping[str, Mapping[str, tuple[Any, ...]]] = with_tuples(
    yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
)
# Axes of every family, unless the family has other values.
SHARED: Mapping[str, tuple[Any, ...]] = {
    "dtype": FLOATS,
    "vectors": (torch.float32, torch.bfloat16),
    "residual": (torch.float32, torch.bfloat16),
    "layout": ("contiguous", "gapped", "offset"),
}
# Axes that say nothing where a call has no operand of such a kind or name.
SAID_OF: Mapping[str, tuple[Kind | str, ...]] = {
    "vectors": (Kind.VECTOR, Kind.GROUPS),
    **dict.fromkeys(("residual", "dropout_p"), ("residual",)),
}
# Axes that choose operands and are no arguments.
SETTINGS = ("norm", "shape", "without", "sharing", *SHARED)

# Of y and residual_out one rounding; of gradients QuACK's tolerances of a backward pass.
FORWARD_TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}
BACKWARD_TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}

Tensors = dict[str, torch.Tensor]


def _wide(by: int, tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + by))
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def _offset(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def _innermost(dimension: int, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    return tensor.movedim(dimension, -1).contiguous().movedim(-1, dimension)


# How a tensor may be laid out in memory, by what gives its values that layout.
LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "offset": _offset,
    "gapped": lambda tensor: _wide(tensor.shape[-1], tensor) if tensor.dim() else tensor,
    "transposed": partial(_innermost, 0),
    "channels last": partial(_innermost, 1),
    "expanded": lambda tensor: tensor.flatten()[0].expand(tensor.shape),
    "negated": lambda tensor: torch.complex(torch.zeros_like(tensor), -tensor).conj().imag,
}


@dataclass(frozen=True)
class Case:
    """A kind of call: a family, and a value on each of its axes.

    Attributes:
        family: a name of `FAMILIES`.
        at: the values by axis.
    """

    family: str
    at: tuple[tuple[str, Any], ...]

    def __getitem__(self, axis: str) -> Any:
        """Return the value on an axis; None if the family lacks the axis."""
        return dict(self.at).get(axis)

    def but(self, **at: Any) -> Case:
        """Return the case with other values on some axes."""
        return replace(self, at=tuple((dict(self.at) | at).items()))

    def __str__(self) -> str:
        usual = {axis: values[0] for axis, values in axes(self.family).items()}
        words = [f"{axis}={value}" for axis, value in self.at if value != usual.get(axis) and axis != "norm"]
        return "-".join([f"{self.family}_{self['norm']}", *words]).replace("torch.", "")

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of vectors; channels lie behind the samples."""
        shape: tuple[int, ...] = self["shape"]
        return shape[1:2] if self.family in IMAGES else shape[-1:]

    @property
    def rows(self) -> list[Parameter]:
        """The family's rows of tensors that the call has."""
        norm = Norm(self["norm"])
        rows = [row for row in FAMILIES[self.family].inputs if row.functional and row.gradient]
        return [row for row in rows if norm in row.default and row.name not in self["without"]]

    def has(self, axis: str) -> bool:
        """Return True if another value on an axis makes another call."""
        of = {each for row in self.rows for each in (row.kind, row.name)}
        return axis not in SAID_OF or not of.isdisjoint(SAID_OF[axis])

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that are no tensors, by name."""
        own = {axis: value for axis, value in self.at if axis not in SETTINGS}
        if self["norm"] in ("layer", "rms") and self.family in ("plain", "channels") and "residual" in self["without"]:
            own["normalized_shape"] = self.size
        if "weight" in self["without"]:
            own.pop("weight_offset", None)
        dropped_at = own.pop("dropout_p", 0.0)
        return {"eps": EPS, **own} | ({"dropout_p": dropped_at, "dropout_rng": RNG} if dropped_at else {})

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        name = FAMILIES[self.family].functions[Norm(self["norm"])]
        if FAMILIES[self.family] is FORWARD:
            name = f"{'add_' * self.has('residual')}{Norm(self['norm']).row.function}"
        if self.family == "added":
            name = f"{Norm(self['norm']).row.function}_add"
        function: Callable[..., Any] = getattr(normforge, name)
        return function

    def run(self, given: Tensors) -> tuple[torch.Tensor, ...]:
        """Call the function: y and, if the family stores a sum, the sum."""
        made = self.function(**given, **self.arguments)
        return made if isinstance(made, tuple) else (made,)


def axes(family: str) -> dict[str, tuple[Any, ...]]:
    """Return all axes of a family."""
    return {**SHARED, **AXES[family]}


def cases(*families: str, vary: Sequence[str] | None = None, **at: Any) -> list[Case]:
    """Return the cases of some families, of all families if none is named.

    Args:
        families: names of `FAMILIES`.
        vary: the axes whose values are combined with one another; None varies each axis by itself.
        at: the values on other axes, where they are not the usual ones.

    Raises:
        ValueError: none of the families has an axis.
    """
    families, found = families or tuple(FAMILIES), []
    if unknown := {*at, *(vary or ())}.difference(*map(axes, families)):
        raise ValueError(f"no axis of {', '.join(families)}: {', '.join(sorted(unknown))}")
    for family in families:
        own = axes(family)
        usual = Case(family, tuple((axis, at.get(axis, values[0])) for axis, values in own.items()))
        if vary is None:
            found.append(usual)
            varied = [axis for axis in own if axis not in at and usual.has(axis)]
            found += [usual.but(**{axis: value}) for axis in varied for value in own[axis][1:]]
        else:
            varied = [axis for axis in vary if axis in own]
            combined = product(*(own[axis] for axis in varied))
            found += [usual.but(**dict(zip(varied, values, strict=True))) for values in combined]
    return found


def operands(case: Case, device: str = "cpu", seed: int = 0) -> Tensors:
    """Return random operands of a case, each a leaf."""
    generator = torch.Generator().manual_seed(seed)
    shape, found = case["shape"], {}
    sharing = dict(zip(("scale", "shift", "gate"), case["sharing"] or (), strict=False))
    for row in case.rows:
        size = {
            Kind.ROWS: shape,
            Kind.IMAGES: shape,
            Kind.SAMPLES: {"sample": (*shape[:1], shape[-1]), "row": shape}.get(sharing.get(row.name, ""), shape[-1:]),
        }.get(row.kind, case.size)
        of_rows = row.kind in (Kind.ROWS, Kind.SAMPLES, Kind.IMAGES)
        mean = {"x": 0.3, "weight": 1.0, "next_weight": 1.0}.get(row.name, 0.0)
        dtype = case["residual"] if row.name == "residual" else case["dtype"] if of_rows else case["vectors"]
        drawn = (torch.randn(size, generator=generator, device="cpu") + mean).to(device, dtype)
        found[row.name] = (LAYOUTS[case["layout"]](drawn) if of_rows else drawn).detach().requires_grad_()
    return found


def doubled(given: Tensors) -> Tensors:
    """Return leaves of the same values in fp64."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}


def formula(case: Case, given: Tensors) -> tuple[torch.Tensor, ...]:
    """Return what a call of a case returns, by the formula in torch's elementary operators."""

    def beside(operand: torch.Tensor) -> torch.Tensor:
        # A row per sample is read by all rows of the sample.
        shared = operand.dim() == 2 and s.dim() > 2
        return operand.view(operand.shape[0], *[1] * (s.dim() - 2), operand.shape[-1]) if shared else operand

    if case.family == "channels":
        (y,) = formula(replace(case, family="plain"), {**given, "x": given["x"].movedim(1, -1)})
        return (functional.silu(y.movedim(-1, 1)) if case["activation"] else y.movedim(-1, 1),)
    s = given["x"] + given.get("x_bias", 0.0)
    if case["dropout_p"]:
        s = dropped(s, case["dropout_p"], SIGNED_RNG.to(s.device))
    if case.family == "modulated" and "gate" in given:
        s = s * beside(given["gate"])
    s = total = s if case.family in BEHIND else s + given.get("residual", 0.0)
    factor = torch.ones((), device=s.device)
    if case.family == "gated":
        factor = torch.sigmoid(given["gate"]) * (given["gate"] if case["activation"] == "silu" else 1)
    s = s if case["norm_before_gate"] in (None, True) else s * factor
    if case.family == "group":
        rows = s.reshape(len(s), case["num_groups"], math.prod(s.shape[1:]) // case["num_groups"])
    else:
        size = case["group_size"] or max(s.shape[-1], 1)
        rows = s.reshape(*s.shape[:-1], s.shape[-1] // size, size)
    rows = rows - rows.mean(-1, keepdim=True) if case["norm"] == "layer" else rows
    eps, squares = case["eps"] or EPS, rows.square()
    squares = squares.sum(-1, keepdim=True) if str(case["norm"]).startswith("l2") else squares.mean(-1, keepdim=True)
    if case.family == "statistics":
        means = [s.mean(-1)] if case["norm"] == "layer" else []
        return (*means, (squares.view(s.shape[:-1]) + eps).rsqrt())
    size = squares.sqrt().clamp(min=eps) if case["norm"] == "l2_clamped" else (squares + eps).sqrt()
    y = (rows / size).view(s.shape)
    # Channels lie behind the samples.
    end = (-1, *[1] * (s.dim() - 2)) if case.family == "group" else (-1,)
    y = y * (given["weight"] + (case["weight_offset"] or 0.0)).view(end) if "weight" in given else y
    y = y + given["bias"].view(end) if "bias" in given else y
    y = y * (1 + beside(given["scale"])) + beside(given["shift"]) if "scale" in given else y
    y = y * factor if case["norm_before_gate"] else y
    y = functional.silu(y) if case.family == "group" and case["activation"] == "silu" else y
    if case.family == "renormed":
        total = given["residual"] + y
        names = {"x": total, "weight": given.get("next_weight"), "bias": given.get("next_bias")}
        again = {name: each for name, each in names.items() if each is not None}
        return (*formula(replace(case, family="plain"), again), total)
    if case.family == "added":
        return (given["residual"] + y,)
    return (y, total) if "residual" in given else (y,)


def gradients(outputs: Sequence[torch.Tensor], given: Tensors, arriving: Sequence[torch.Tensor | None]) -> Tensors:
    """Return the gradients of the operands that require one; None arrives at an output that nothing follows."""
    due = [name for name, tensor in given.items() if tensor.requires_grad]
    pairs = [(y, dy) for y, dy in zip(outputs, arriving, strict=True) if dy is not None and y.requires_grad]
    if not due or not pairs:
        return {}
    ends, at_ends = zip(*pairs, strict=True)
    found = torch.autograd.grad(ends, [given[name] for name in due], at_ends, allow_unused=True)
    return {name: gradient for name, gradient in zip(due, found, strict=True) if gradient is not None}


def arriving_at(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return random gradients of outputs; of another seed than operands, because the gradient of x by x is almost 0."""
    generator = torch.Generator().manual_seed(1729)
    return [torch.randn(output.shape, generator=generator).to(output) for output in outputs]


def exact(case: Case, given: Tensors, arriving: Sequence[torch.Tensor | None]) -> Tensors:
    """Return the gradients of fp64 autograd, by the formula."""
    wide = doubled(given)
    for name, tensor in wide.items():
        tensor.requires_grad_(given[name].requires_grad)
    return gradients(formula(case, wide), wide, [None if dy is None else dy.double() for dy in arriving])


def check(
    case: Case,
    given: Tensors,
    arriving: Sequence[torch.Tensor | None] | None = None,
    run: Callable[[Tensors], tuple[torch.Tensor, ...]] | None = None,
) -> None:
    """Run a case, and fail unless outputs and gradients are fp64 autograd's, and what the call reads is as it was.

    Args:
        case: a kind of call.
        given: its operands.
        arriving: the gradients that arrive at the outputs; None draws some.
        run: makes the call some other way than eagerly by the case's function.
    """
    before = [(tensor, tensor.detach().clone()) for tensor in given.values()]
    outputs = case.run(given) if run is None else run(given)
    arriving = arriving_at(outputs) if arriving is None else arriving
    before += [(dy, dy.clone()) for dy in arriving if dy is not None]
    found = gradients(outputs, given, arriving)
    assert all(torch.equal(*pair) for pair in before), "an operand, or a gradient that arrived, was written to"
    hold(case, given, outputs, arriving, found)


def hold(
    case: Case, given: Tensors, outputs: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor | None], found: Tensors
) -> None:
    """Fail unless the outputs of a call, and the gradients for what arrived at them, are those of the formula."""
    with torch.no_grad():
        wanted = formula(case, doubled(given))
    coarse = coarser(given["x"].dtype, given.get("residual", given["x"]).dtype)
    y_dtype = (
        torch.float32 if case.family == "statistics" else given["residual" if case.family == "added" else "x"].dtype
    )
    assert outputs[0].dtype is y_dtype
    for output, its in zip(outputs, wanted, strict=True):
        assert output.shape == its.shape
        close("output", output, its, FORWARD_TOLERANCES[coarser(output.dtype, coarse)])
    agree(given, found, exact(case, given, arriving), coarse)


def agree(given: Tensors, found: Tensors, wanted: Tensors, coarse: torch.dtype = torch.float32) -> None:
    """Fail unless each gradient has its operand's shape and dtype and is as wanted, but for a rounding to `coarse`."""
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert (gradient.shape, gradient.dtype) == (given[name].shape, given[name].dtype), name
        tolerance = BACKWARD_TOLERANCES[coarser(coarse, gradient.dtype)]
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=tolerance, atol=tolerance, msg=name)


def close(name: str, actual: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Fail unless every element is within a tolerance of the oracle's, beside it and beside the tensor's own size."""
    size = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(
        actual.double(), wanted, rtol=tolerance, atol=tolerance * max(size, 1.0), msg=lambda text: f"{name}: {text}"
    )


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype whose rounding is the larger one."""
    return max(a, b, key=lambda dtype: torch.finfo(dtype).eps)

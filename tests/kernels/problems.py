"""Random inputs for a mode, and the check of everything a call returns against the fp64 oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from normforge import LayerNormOutput, QuantisedOutput, reference
from normforge.calls.functions import FUNCTIONS, completed
from normforge.codegen.families import Kind, Parameter
from normforge.codegen.model import Mode
from normforge.codegen.parameters import FORWARD, family_of
from normforge.codegen.values import INPUT_DTYPES, DType, Norm
from normforge.dtypes import TORCH_DTYPES, arguments_of
from normforge.families import public
from normforge.operators import computing
from normforge.reference import gated as gating_reference
from normforge.reference import modulated as modulation_reference
from normforge.reference import quantised as quantisation_reference
from normforge.tools.compare import compare, compare_quantised, numbers_of

_FORWARD: dict[Norm, Callable[..., LayerNormOutput]] = {
    norm: getattr(public, name) for norm, name in FORWARD.functions.items()
}
_ORACLES: dict[str, Mapping[Norm, Callable[..., Any]]] = {
    "": reference.FORWARD,
    "modulated": modulation_reference.FORWARD,
    "gated": gating_reference.FORWARD,
    "quantised": quantisation_reference.FORWARD,
}

# How many tokens there are of a shape's rows, where these are the groups of one.
_TOKENS = 2

# The arguments that `Problem` draws a row of for each of x's.
_ROWS = ("x", "residual", "scale", "gate")

# What is drawn from (0, 1) is divided by it, so that scales that are given cut off some of y, and not most.
_NARROW = {"static_scale": 100.0, "column_scale": 100.0, "scale_ub": 1.0, "global_scale": 5e-4}

# The oracle holds a few fp64 copies of what it is given; rows are independent, so it takes them in blocks.
_ORACLE_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Problem:
    """One call: a mode, a shape, and what may vary without another instance.

    Attributes:
        mode: what is computed.
        shape: x's shape, (..., N).
        row_stride: elements from row to row of x and residual; None is N.
        dtypes: tensor name to element type, for those that need not be x's.
        absent: which of weight and bias are left out.
        keywords: further arguments of the call, eps say.
    """

    mode: Mode
    shape: tuple[int, ...]
    row_stride: int | None = None
    dtypes: dict[str, DType] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    keywords: dict[str, Any] = field(default_factory=dict)

    def arguments(self, device: str) -> dict[str, Any]:
        """Fresh arguments: everything uniform in (-0.5, 0.5), the smooth scale in (-1, 1), as ck_tile draws them."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(repr(self).encode()))
        mode, n = self.mode, self.shape[-1]

        def draw(parameter: Parameter) -> torch.Tensor | None:
            name = parameter.name
            if name in self.absent:
                return None
            if parameter.kind is Kind.RANDOM:
                return torch.randint(2**63 - 1, (2,), generator=generator, device=device)
            if parameter.kind is Kind.SCALE:
                # One a row.
                return torch.rand(self.shape[:-1], generator=generator, device=device) + 0.5
            if parameter.kind is Kind.VALUE:
                return torch.rand(1, generator=generator, device=device).div(_NARROW[name]).add(1e-3)
            dtype = TORCH_DTYPES[self.dtypes.get(name, mode.dtype_in if name == "x" else mode.operand_dtype)]
            # A shift for all rows, and a scale and a gate for each.
            is_rows = parameter.kind is Kind.ROWS or (parameter.kind is Kind.SAMPLES and name != "shift")
            width = 2.0 if name == "smooth_scale" else 1.0
            of_groups = mode.grouped and parameter.kind is Kind.GROUPS
            shape = (*self.shape[:-1], self.row_stride or n) if is_rows or of_groups else (n,)
            shape = (_TOKENS, *shape) if is_rows and mode.grouped else shape
            uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
            if name == "column_scale":
                return uniform.add_(0.5).div_(_NARROW[name]).to(dtype)
            return uniform.sub_(0.5).mul_(width).to(dtype)[..., :n]

        return {**arguments_of(mode, draw), **self.keywords}

    def check(self, device: str) -> LayerNormOutput | QuantisedOutput:
        """Run the call and hold every output of every row against the oracle."""
        arguments = self.arguments(device)
        beside = family_of(self.mode).name
        if beside == "quantised":
            quantised = computing.run(*_operated(self.mode, arguments))
            assert isinstance(quantised, QuantisedOutput)
            return check_quantised(self.mode, arguments, quantised)
        actual = _beside(self.mode, arguments) if beside else _FORWARD[self.mode.norm](**arguments)
        _check_against_oracle(self, arguments, actual)
        return actual


def _beside(mode: Mode, arguments: dict[str, Any]) -> LayerNormOutput:
    """A call of a gated, modulated or quantised norm, as its operator makes it."""
    found = computing.run(*_operated(mode, arguments))
    assert isinstance(found, LayerNormOutput)
    return found


def _operated(mode: Mode, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of an operator, and what it is given."""
    function = family_of(mode).functions[mode.norm]
    passed = FUNCTIONS[function].passed
    return function, {name: value for name, value in completed(function, arguments).items() if name in passed}


def check_quantised(mode: Mode, arguments: dict[str, Any], actual: QuantisedOutput) -> QuantisedOutput:
    """Hold every output of a call of quantised norms against the oracle, and return it."""
    expected = quantisation_reference.FORWARD[mode.norm](**arguments)
    scale = actual.y_scale
    if scale is not None:
        scale = numbers_of(scale, mode, expected.amax.shape, arguments.get("global_scale"))
    wrong = [finding for finding in compare_quantised(actual, scale, expected) if not finding.ok]
    assert not wrong, f"{mode.name}: {wrong}"
    return actual


def mixed_dtypes(mode: Mode, salt: int) -> dict[str, DType]:
    """An element type for every tensor whose type is free, another mix for every salt."""
    names = [
        row.name
        for row in family_of(mode).inputs
        if row.name != "x" and row.kind not in (Kind.SCALE, Kind.VALUE, Kind.RANDOM)
    ]
    return {name: INPUT_DTYPES[(salt + index) % len(INPUT_DTYPES)] for index, name in enumerate(names)}


def _check_against_oracle(problem: Problem, arguments: dict[str, Any], actual: LayerNormOutput) -> None:
    n = problem.shape[-1]
    x = arguments["x"]
    rows = x.numel() // n
    block = max(1, _ORACLE_ELEMENTS // n)
    oracle = _ORACLES[family_of(problem.mode).name][problem.mode.norm]
    flat = {name: _rows_of(tensor, n) for name, tensor in arguments.items() if name in _ROWS}
    if "x_scale" in arguments:
        flat["x_scale"] = arguments["x_scale"].reshape(-1)
    if problem.mode.grouped:
        shared = {name: arguments[name] for name in ("weight", "bias") if name in arguments}
        flat |= {name: vector.expand(x.shape).reshape(-1, n) for name, vector in shared.items()}
    for start in range(0, rows, block):
        part = slice(start, start + block)
        whole = {"first_row": start} if problem.mode.dropout else {}
        expected = oracle(**arguments | whole | {name: rows[part] for name, rows in flat.items()})
        findings = compare(_slice(actual, part, n), expected, problem.mode.rounding)
        wrong = [finding for finding in findings if not finding.ok]
        assert not wrong, f"{problem}\nrows {part.start}..{part.stop}: {wrong}"


def _rows_of(tensor: torch.Tensor, n: int) -> torch.Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.view(1, n)


def _slice(output: LayerNormOutput, part: slice, n: int) -> LayerNormOutput:
    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.reshape(-1)[part]

    return LayerNormOutput(
        y=_rows_of(output.y, n)[part],
        residual_out=None if output.residual_out is None else _rows_of(output.residual_out, n)[part],
        y_scale=rows(output.y_scale),
        mean=rows(output.mean),
        rstd=rows(output.rstd),
    )

"""The kernels that normalise heads of queries and keys and rotate them, against the formula in fp64."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from itertools import product
from math import gcd, inf
from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.codegen import emit
from normforge.codegen.tiling import power_of_two
from normforge.kernels.gpu import Target
from normforge.kernels.key import KernelKey, pointer_type
from normforge.kernels.obtain import compile_for

from .bare import run
from .compilation import TARGETS, binary_of

POINTER = "_ptr"


@dataclass(frozen=True)
class Case:
    """One call: the sizes, and how each head is normalised and rotated."""

    n: int = 64
    rotary_dim: int = 64
    q_heads: int = 4
    k_heads: int = 2
    tokens: int = 5
    norm: str = "rms"
    interleaved: bool = False
    positions: bool = False
    weights: bool = True
    offset: float = 0.0
    eps: float = 1e-6
    rounds_first: bool = False
    dtype: torch.dtype = torch.bfloat16
    rows: int = 4

    @property
    def constants(self) -> dict[str, Any]:
        half = self.rotary_dim // 2
        return {
            "Q_HEADS": self.q_heads,
            "K_HEADS": self.k_heads,
            "N": self.n,
            "HALF": half,
            "BLOCK": power_of_two(half),
            "REST": power_of_two(max(1, self.n - self.rotary_dim)),
            "ROWS": self.rows,
            "ALIGNMENT": gcd(self.n, half, 16),
            "INTERLEAVED": self.interleaved,
            "CENTRES": self.norm == "layer",
            "AVERAGES": self.norm != "l2",
            "ROUNDS_FIRST": self.rounds_first,
            "PDL": False,
        }


CASES = (
    *(Case(n=n, rotary_dim=n, interleaved=each) for n, each in product((64, 80, 96, 128, 192, 256), (False, True))),
    *(
        Case(norm=norm, interleaved=each, dtype=torch.float32)
        for norm in ("rms", "layer", "l2")
        for each in (False, True)
    ),
    *(Case(n=80, rotary_dim=32, norm=norm, interleaved=each) for norm, each in (("rms", False), ("layer", True))),
    Case(positions=True, dtype=torch.float16),
    Case(weights=False),
    # Gemma adds 1 to the weight.
    Case(offset=1.0, eps=0.0, tokens=3, q_heads=3, k_heads=1),
    Case(rounds_first=True),
    Case(q_heads=1, k_heads=1, tokens=1, rows=8),
)


def problem(case: Case) -> dict[str, torch.Tensor]:
    """Operands by name: q and k are heads of one packed tensor, v behind them."""
    torch.manual_seed(0)
    heads = case.q_heads + 2 * case.k_heads
    packed = torch.randn(case.tokens, heads, case.n).to(case.dtype)
    angles = torch.randn(case.tokens + 3, case.rotary_dim // 2)
    operands = {
        "q": packed[:, : case.q_heads],
        "k": packed[:, case.q_heads : case.q_heads + case.k_heads],
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    if case.weights:
        operands |= {"q_weight": torch.randn(case.n), "k_weight": torch.randn(case.n)}
    if case.positions:
        operands["positions"] = torch.randperm(case.tokens + 3)[: case.tokens]
    return operands


def formula(case: Case, name: str, operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute one of the two outputs in the dtype of the operands, unrounded but for the norm's own rounding."""
    x, weight = operands[name], operands.get(f"{name}_weight")
    h = x - x.mean(-1, keepdim=True) if case.norm == "layer" else x
    squares = h.square().sum(-1, keepdim=True) / (1 if case.norm == "l2" else case.n)
    h = h * (squares + case.eps).rsqrt()
    if case.rounds_first:
        # Autograd differentiates the norm as if nothing was rounded.
        h = h + (h.to(case.dtype).to(h.dtype) - h).detach()
    z = h if weight is None else h * (weight + case.offset)
    rows = operands.get("positions", torch.arange(case.tokens))
    cos, sin = (operands[table][rows].unsqueeze(1) for table in ("cos", "sin"))
    rotated, rest = z[..., : case.rotary_dim], z[..., case.rotary_dim :]
    pairs = rotated.reshape(*rotated.shape[:-1], *((-1, 2) if case.interleaved else (2, -1)))
    first, second = pairs.unbind(-1 if case.interleaved else -2)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1 if case.interleaved else -2)
    return torch.cat((turned.flatten(-2), rest), -1)


def launch(package: Path, symbol: str, grid: tuple[int, ...], case: Case, tensors: dict[str, torch.Tensor]) -> None:
    path = package / "rotary.py"
    if not path.exists():
        path.write_text(emit.render("rotary.py.j2"))
        importlib.invalidate_caches()
    heads = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 3}
    values: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    values |= {f"{name}_token_stride": tensor.stride(0) for name, tensor in heads.items()}
    values |= {f"{name}_head_stride": tensor.stride(1) for name, tensor in heads.items()}
    values |= {"M": case.tokens, "table_row_stride": tensors["cos"].stride(0)}
    values |= {"eps": case.eps, "weight_offset": case.offset} | case.constants
    run(getattr(importlib.import_module(f"{package.name}.rotary"), symbol), grid, values)


def forward(package: Path, case: Case, tensors: dict[str, torch.Tensor]) -> None:
    programs = sum(-(-case.tokens * heads // case.rows) for heads in (case.q_heads, case.k_heads))
    launch(package, "qk_norm_rope_fwd", (programs,), case, tensors)


def wide(operands: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return leaves in fp64, which autograd can differentiate; positions as they are."""
    return {
        name: each.detach().double().requires_grad_() if each.is_floating_point() else each
        for name, each in operands.items()
    }


def tolerance(case: Case) -> tuple[float, float]:
    """Return how far off outputs may be, beside their values and beside 1."""
    # Half of a last place, and what fp32 adds to it; a norm that fp32 rounds to the other side is a last place off.
    places = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[case.dtype]
    return (places * 2.02, places * 8) if case.rounds_first else (places * 1.01, 4e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs(package: Path, case: Case) -> None:
    operands = problem(case)
    outs = {f"{name}_out": torch.full_like(operands[name], inf) for name in ("q", "k")}
    forward(package, case, operands | outs)
    for name in ("q", "k"):
        expected = formula(case, name, wide(operands))
        rtol, atol = tolerance(case)
        torch.testing.assert_close(outs[f"{name}_out"].double(), expected.detach(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(package: Path, interleaved: bool) -> None:
    """Heads of a packed tensor are overwritten, and what lies beside them is not."""
    case = Case(n=80, rotary_dim=64, interleaved=interleaved)
    operands = problem(case)
    outs = {f"{name}_out": torch.empty_like(operands[name]) for name in ("q", "k")}
    forward(package, case, operands | outs)
    packed = operands["q"]._base
    assert packed is not None
    expected = torch.cat([outs["q_out"], outs["k_out"], packed[:, case.q_heads + case.k_heads :]], 1)
    forward(package, case, operands | {f"{name}_out": operands[name] for name in ("q", "k")})
    assert torch.equal(packed, expected)


def test_a_mean_far_from_zero(package: Path) -> None:
    """The spread of a row is kept beside a mean ten thousand times as large."""
    case = Case(norm="layer", dtype=torch.float32)
    operands = problem(case)
    operands |= {name: operands[name] + 1e4 for name in ("q", "k")}
    outs = {f"{name}_out": torch.empty_like(operands[name]) for name in ("q", "k")}
    forward(package, case, operands | outs)
    torch.testing.assert_close(outs["q_out"].double(), formula(case, "q", wide(operands)).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(package: Path, case: Case) -> None:
    operands = problem(case)
    leaves = wide(operands)
    due = {f"d{name}_out": torch.randn_like(operands[name]) for name in ("q", "k")}
    outputs = [formula(case, name, leaves) for name in ("q", "k")]
    torch.autograd.backward(outputs, [each.double() for each in due.values()])
    found = {f"d{name}": torch.full_like(operands[name], inf) for name in ("q", "k")}
    programs = 3
    weights = [name for name in operands if name.endswith("weight")]
    partials = {f"d{name}_partials": torch.full((programs, case.n), inf) for name in weights}
    launch(package, "qk_norm_rope_bwd", (programs, 2), case, operands | due | found | partials)
    for name in ("q", "k"):
        gradient = leaves[name].grad
        assert gradient is not None
        scale = float(gradient.abs().max())
        rtol = tolerance(case)[0]
        torch.testing.assert_close(found[f"d{name}"].double(), gradient, rtol=rtol, atol=4e-6 * max(1.0, scale))
    for name in weights:
        gradient, allowed = leaves[name].grad, 2**-8 * 8 if case.rounds_first else 2e-5
        torch.testing.assert_close(partials[f"d{name}_partials"].sum(0).double(), gradient, rtol=1e-5, atol=allowed)


COMPILED = (
    Case(n=128, rotary_dim=128, rows=16),
    Case(n=80, rotary_dim=32, norm="layer", interleaved=True, positions=True),
    Case(n=256, rotary_dim=256, norm="l2", weights=False, dtype=torch.float16),
    Case(n=96, rotary_dim=96, rounds_first=True, dtype=torch.float16),
)


@pytest.mark.compile
@pytest.mark.parametrize("symbol", ["qk_norm_rope_fwd", "qk_norm_rope_bwd"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compile(package: Path, case: Case, target: Target, symbol: str) -> None:
    path = package / "rotary.py"
    path.write_text(emit.render("rotary.py.j2"))
    importlib.invalidate_caches()
    function = getattr(importlib.import_module(f"{package.name}.rotary"), symbol)
    constants = case.constants | {"PDL": target.launches_early}

    def word(name: str) -> Any:
        if name in constants:
            return constants[name]
        if name in ("eps", "weight_offset"):
            return "fp32"
        if not name.endswith(POINTER):
            return "i32" if name == "M" else "i64"
        if name == "positions_ptr":
            return pointer_type(torch.int64, aligned=True) if case.positions else None
        if "weight" in name and not case.weights:
            return None
        is_wide = "weight" in name or name in ("cos_ptr", "sin_ptr")
        return pointer_type(torch.float32 if is_wide else case.dtype, aligned=True)

    arguments = tuple((name, word(name)) for name in function.arg_names)
    options = {"num_warps": 4, **({"launch_pdl": True} if constants["PDL"] else {})}
    compiled = compile_for(
        KernelKey(f"{function.__module__}:{symbol}", arguments, tuple(options.items())), function, target
    )
    assert binary_of(target) in compiled.asm

"""One problem of the command line: its axes and sizes, and its random tensors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..calls import api
from ..codegen.model import DType, FusedAdd, FusedQuant, Norm
from ..dtypes import TORCH_DTYPES

SEED = 11939

# The API's, and for LayerNorm ck_tile's too.
DEFAULT_EPS: dict[Norm, float] = {
    norm: inspect.signature(function).parameters["eps"].default
    for norm, function in ((Norm.LAYER, api.layernorm2d_fwd), (Norm.RMS, api.rmsnorm2d_fwd))
}


@dataclass(frozen=True)
class Strides:
    """Elements from row to row of each tensor of M rows."""

    x: int
    residual: int
    y: int
    residual_out: int

    @classmethod
    def all(cls, stride: int) -> Strides:
        """The same stride for every tensor."""
        return cls(stride, stride, stride, stride)


@dataclass(frozen=True)
class Problem:
    """What to run; every tensor but y is of prec_i, except smooth_scale (prec_sm) and y_scale (prec_sy).

    An eps of None becomes the norm's default.
    """

    m: int
    n: int
    norm: Norm = Norm.LAYER
    prec_i: DType = DType.FP16
    prec_o: DType = DType.FP16
    prec_sm: DType = DType.FP32
    prec_sy: DType = DType.FP32
    fadd: FusedAdd = FusedAdd.NONE
    fquant: FusedQuant = FusedQuant.NONE
    x_bias: bool = False
    save_mv: bool = False
    backward: bool = False
    eps: float | None = None
    strides: Strides | None = None

    def __post_init__(self) -> None:
        if self.eps is None:
            object.__setattr__(self, "eps", DEFAULT_EPS[self.norm])

    @property
    def row_strides(self) -> Strides:
        """The strides, which are n where none were given."""
        return self.strides or Strides.all(self.n)


def inputs(problem: Problem, device: torch.device) -> dict[str, Any]:
    """The arguments of the forward call, with ck_tile's inputs: uniform in ±0.5, and the smooth scale in ±1."""
    generator = torch.Generator(device).manual_seed(SEED)

    def uniform(shape: tuple[int, ...], dtype: DType, bound: float = 0.5) -> torch.Tensor:
        values = torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)
        return values.to(TORCH_DTYPES[dtype])

    n, prec_i = problem.n, problem.prec_i
    strides = problem.row_strides
    arguments: dict[str, Any] = {
        "x": uniform((problem.m, strides.x), prec_i)[:, :n],
        "weight": uniform((n,), prec_i),
        "eps": problem.eps,
        "fadd": problem.fadd,
        "fquant": problem.fquant,
        "out_dtype": TORCH_DTYPES[problem.prec_o],
        "scale_dtype": TORCH_DTYPES[problem.prec_sy],
        "save_mv": problem.save_mv,
    }
    if problem.norm.centres:
        arguments["bias"] = uniform((n,), prec_i)
    if problem.x_bias:
        arguments["x_bias"] = uniform((n,), prec_i)
    if problem.fadd.adds:
        arguments["residual"] = uniform((problem.m, strides.residual), prec_i)[:, :n]
    if problem.fquant.smooths:
        arguments["smooth_scale"] = uniform((n,), problem.prec_sm, bound=1.0)
    return arguments


def gradients_in(problem: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """The gradients that arrive: dy, and with fused add that of the stored sum; uniform in ±0.5."""
    generator = torch.Generator(device).manual_seed(SEED + 1)
    strides = {"dy": problem.row_strides.y}
    if problem.fadd.stores:
        strides["dresidual_out"] = problem.row_strides.residual_out
    return {
        name: torch.empty((problem.m, stride), device=device)
        .uniform_(-0.5, 0.5, generator=generator)
        .to(TORCH_DTYPES[problem.prec_i])[:, : problem.n]
        for name, stride in strides.items()
    }


def poisoned_outputs(problem: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """The call's `out` and `residual_out`, full of what no kernel writes: an element left unwritten cannot pass."""

    def poisoned(stride: int, dtype: DType) -> torch.Tensor:
        poison = torch.tensor(-128 if dtype.is_int else float("nan"), device=device).to(TORCH_DTYPES[dtype])
        return poison.repeat(problem.m, stride)[:, : problem.n]

    strides = problem.row_strides
    outputs = {"out": poisoned(strides.y, problem.prec_o)}
    if problem.fadd.stores:
        outputs["residual_out"] = poisoned(strides.residual_out, problem.prec_i)
    return outputs

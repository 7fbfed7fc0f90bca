"""Calls that are sanitised of kernels that the table lacks: dropout, modulation, gates, GroupNorm, and columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml

import normforge

from ..cases import Case, cases, operands


@dataclass(frozen=True)
class Beside:
    """One call, and its gradients unless y is quantised.

    Attributes:
        step: what stands beside the norm: "dropped", "modulated", "gated" or "grouped"; with "_quantised", y is; or
            "plain_columns", of a norm and of dx quantised along columns too.
        case: the call, of the table of families.
    """

    step: str
    case: Case

    @property
    def name(self) -> str:
        """One word for tables and logs."""
        return f"{self.step}_{self.case}".replace(" ", "")

    @property
    def shape(self) -> tuple[int, ...]:
        """X's shape."""
        shape: tuple[int, ...] = self.case["shape"]
        return shape

    @property
    def m(self) -> int:
        """How many rows there are, or samples."""
        return prod(self.shape[: 1 if self.step == "grouped" else -1])

    @property
    def n(self) -> int:
        """How long they are."""
        return prod(self.shape) // self.m

    def call(self, device: torch.device) -> None:
        """Make the call: each tensor an allocation of its own, exactly as long as it is."""
        given = {name: _copied(tensor, device) for name, tensor in operands(self.case).items()}
        if "_" in self.step:
            name = f"{self.case.family}_{self.case['norm']}norm2d_fwd"
            more = {**self.case.arguments, "save_mv": True, "out_dtype": torch.int8}
            if self.step == "plain_columns":
                name, more = f"quantised_{self.case['norm']}_norm", {"out_dtype": torch.float8_e4m3fn, "group_size": 32}
                more |= {"columnwise": "transposed", "amax_out": torch.zeros(1, device=device)}
            function: Any = getattr(normforge, name)
            with torch.no_grad():
                outputs = function(**given, **more, fquant="dynamic")
                if self.step == "plain_columns":
                    x = given["x"] if outputs.residual_out is None else outputs.residual_out
                    saved = {"rstd": outputs.rstd} | ({} if outputs.mean is None else {"mean": outputs.mean})
                    back = getattr(normforge, f"quantised_{self.case['norm']}norm2d_bwd")
                    back(given["x"], x, given["weight"], **saved, group_size=32, wants=("dweight",))
            return
        if self.step == "grouped":
            with torch.no_grad():
                self.case.run(given)
        outputs = self.case.run(given)
        gradients = [torch.empty_like(each).copy_(torch.ones(each.shape)) for each in outputs]
        torch.autograd.grad(outputs, [*given.values()], gradients)


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor by copies alone: what a kernel of torch's reads is not what is looked for."""
    values = tensor.detach()
    return torch.empty_like(values, device=device).copy_(values).requires_grad_()


TABLE = yaml.safe_load(Path(__file__).with_name("cells.yaml").read_text())
_AFFINE = ("weight", "bias")


def beside() -> Iterator[Beside]:
    """Yield all of them."""
    bf16, fp32 = ({"dtype": dtype, "vectors": dtype, "residual": dtype} for dtype in (torch.bfloat16, torch.float32))
    gate = ("norm", "norm_before_gate")

    def shapes(name: str) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in TABLE[name]]

    def several(step: str, vary: tuple[str, ...], **at: Any) -> Iterator[Beside]:
        family = {"dropped": "plain", "grouped": "group"}.get(step, step.partition("_")[0])
        yield from (Beside(step, case) for case in cases(family, vary=vary, **at))

    for shape, dtypes in (*((shape, bf16) for shape in shapes("rows")), ((5, 1001), fp32)):
        yield from several("dropped", ("norm",), shape=shape, without=("x_bias",), dropout_p=0.3, **dtypes)
        yield from several("gated", (*gate, "activation"), shape=shape, **dtypes)
        yield from several("gated_quantised", ("norm",), shape=shape, **dtypes)
        yield from several("plain_columns", ("norm",), shape=shape, without=("x_bias",), **dtypes)
    for shape, dtypes in (*((shape, bf16) for shape in shapes("samples")), ((2, 3, 1001), fp32)):
        yield from several("modulated", ("norm",), shape=shape, without=("gate", "residual", *_AFFINE), **dtypes)
        yield from several("modulated", ("norm",), shape=shape, without=_AFFINE, **dtypes)
        yield from several("modulated_quantised", ("norm",), shape=shape, without=_AFFINE, **dtypes)
    for dtypes in (bf16, fp32):
        yield from several("gated", gate, shape=(5, 96), group_size=24, **dtypes)
        for shape, groups in TABLE["groups"]:
            for layout in ("contiguous", "channels last"):
                at = {"shape": tuple(shape), "num_groups": groups, "layout": layout}
                yield from several("grouped", ("activation",), **at, **dtypes)

"""Calls that are sanitised of kernels that the table lacks: dropout, modulation, gates, GroupNorm, and columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml

import normforge

from ..cases import Case, cases, operands, with_tuples


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


def beside() -> Iterator[Beside]:
    """Yield all of them."""
    for kind in with_tuples(TABLE["beside"]):
        for dtype, shapes in kind["of"].items():
            of = dict.fromkeys(("dtype", "vectors", "residual"), getattr(torch, dtype))
            for shape, (step, vary, at) in product(shapes, kind["calls"]):
                family = {"dropped": "plain", "grouped": "group"}.get(step, step.partition("_")[0])
                yield from (Beside(step, case) for case in cases(family, vary=vary, shape=shape, **of, **at))

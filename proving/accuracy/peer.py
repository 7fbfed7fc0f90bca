"""torch's own operators on the same data: the yardstick.

They are the operators behind `torch.nn.functional.layer_norm` and `rms_norm`, called by name because they also return
their statistics. They take operands of x's dtype, as all are here. Where ours returns fp32 of 16-bit rows, adds a
residual, or quantises, torch is given the operands in fp32, which loses nothing: its best way to the same result. Saved
statistics, which it returns in 16 bits on a CPU, are those of such a call too. Rows that are rounded before the weight
are those of its operator without a weight, in fp32, rounded, and multiplied in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

EPS = 1e-5
_aten = torch.ops.aten


def forward(centres: bool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return y in x's dtype, and mean (where rows are centred) and rstd in fp32, (M,)."""
    y, statistics = _run(centres, x, weight, bias)
    if any(value.dtype != torch.float32 for value in statistics.values()):
        _, statistics = _run(centres, x.float(), weight.float(), None if bias is None else bias.float())
    return {"y": y} | {name: value.flatten() for name, value in statistics.items()}


def forward_rounding_first(
    centres: bool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, half: torch.dtype
) -> dict[str, torch.Tensor]:
    """Compute rows that are rounded to a 16-bit type before they are multiplied by the weight; y is fp32."""
    y, statistics = _run(centres, x.float(), None, None)
    y = y.to(half).float() * weight.float()
    y = y if bias is None else y + bias.float()
    return {"y": y} | {name: value.flatten() for name, value in statistics.items()}


def _run(
    centres: bool, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    shape = [x.shape[-1]]
    if centres:
        y, mean, rstd = _aten.native_layer_norm(x, shape, weight, bias, EPS)
        return y, {"mean": mean, "rstd": rstd}
    y, rstd = _aten._fused_rms_norm(x, shape, weight, EPS)
    return y, {"rstd": rstd}


def backward(
    centres: bool, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, statistics: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return dx, dweight and dbias (where rows are centred), in x's dtype."""
    shape, dtype = [x.shape[-1]], x.dtype
    rstd = statistics["rstd"].unsqueeze(-1)
    if centres:
        # The CPU's operator takes fp32 statistics with fp32 weights alone.
        weight = weight if x.is_cuda else weight.float()
        mean, zeros = statistics["mean"].unsqueeze(-1), torch.zeros_like(weight)
        gradients: Any = _aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, zeros, [True] * 3)
    elif x.is_cuda:
        gradients = _aten._fused_rms_norm_backward(dy, x, shape, rstd, weight, [True] * 2)
    else:
        # A CPU has no such operator: autograd through the forward one, in fp32.
        leaves = tuple(tensor.detach().clone().float().requires_grad_() for tensor in (x, weight))
        y = torch.nn.functional.rms_norm(leaves[0], shape, leaves[1], EPS)
        gradients = torch.autograd.grad(y, leaves, dy.float())
    names = ("dx", "dweight", "dbias") if centres else ("dx", "dweight")
    return {name: gradient.detach().to(dtype) for name, gradient in zip(names, gradients, strict=True)}


def dweight_rounding_first(
    dy: torch.Tensor, x: torch.Tensor, statistics: dict[str, torch.Tensor], half: torch.dtype
) -> torch.Tensor:
    """Return the gradient of a weight that rows were rounded before, in x's dtype: torch has no operator for that."""
    h = x.float()
    if "mean" in statistics:
        h = h - statistics["mean"].unsqueeze(-1)
    h = (h * statistics["rstd"].unsqueeze(-1)).to(half).float()
    return (dy.float() * h).sum(0).to(x.dtype)

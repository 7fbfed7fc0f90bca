"""The RMSNorm classes of Hugging Face's models: which formula each computes, and how a kernel computes it.

Such a class is known by its shape (a 1-D `weight`, no bias, `variance_epsilon` or `eps`), and many share it that do
not compute the same: Gemma's adds 1 to the weight, Olmo2's rounds after the weight, T5's to the weight's dtype. So
what one computes is found by trying it on random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum

import torch

from .codegen.model import Norm
from .functional import normalise, rms_norm_cast_before_weight
from .modules import RMSNorm


class CastOrder(Enum):
    """When the normalised row is rounded; the value names a model family that does so."""

    TO_INPUT_BEFORE_WEIGHT = "Llama"
    TO_WEIGHT_BEFORE_WEIGHT = "T5"
    AFTER_WEIGHT = "Olmo2"


class T5RMSNorm(RMSNorm):
    """RMSNorm as Hugging Face's `T5LayerNorm`: rounded to the weight's dtype, which is also the result's.

    With cast_before_weight (as there), rounded before the multiplication with the weight, else once, after it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x: (..., *normalized_shape), fp16, bf16 or fp32; returns its shape in the weight's dtype."""
        dtype = self.weight.dtype
        if self.cast_before_weight:
            return rms_norm_cast_before_weight(x, self.normalized_shape, self.weight, self.eps, dtype)
        return normalise(Norm.RMS, x, self.normalized_shape, self.weight, eps=self.eps, out_dtype=dtype)[0]


def epsilon(module: torch.nn.Module) -> float | None:
    """The epsilon of a module that is built like Hugging Face's RMSNorms; None if it is not built so."""
    parameters = dict(module.named_parameters())
    weight = parameters.pop("weight", None)
    if weight is None or weight.dim() != 1 or parameters or getattr(module, "bias", None) is not None:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


# Element types of x and weight that tell the orders apart.
_PROBES = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
_PROBE_ELEMENTS = 4096


def cast_order(module: torch.nn.Module, eps: float) -> CastOrder | None:
    """Which order of casts reproduces a module's forward on random numbers; None if none does.

    The module itself is neither called nor changed: a copy with a random weight on the CPU is, past its hooks.

    Raises:
        Exception: whatever the module's forward raises.
    """
    n = module.get_parameter("weight").numel()
    generator = torch.Generator().manual_seed(0)
    matching = set(CastOrder)
    for x_dtype, weight_dtype in _PROBES:
        rows = torch.randn(max(4, _PROBE_ELEMENTS // n), n, generator=generator)
        # Rows of every size down to that of eps, so that eps must be in its place.
        rows *= torch.logspace(-4, 2, len(rows))[:, None]
        x, weight = rows.to(x_dtype), torch.randn(n, generator=generator).to(weight_dtype)
        twin = copy.copy(module)
        twin._parameters = {"weight": torch.nn.Parameter(weight)}
        with torch.no_grad():
            actual = type(module).forward(twin, x)
        matching = {order for order in matching if _agree(actual, _FORMULAS[order](x, weight, eps))}
    return next((order for order in CastOrder if order in matching), None)


def _agree(actual: object, expected: torch.Tensor) -> bool:
    """Whether two results are equal but for a bf16 rounding here and there, which another order of sums may tip."""
    if not isinstance(actual, torch.Tensor) or (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return False
    differing = ~torch.isclose(actual.float(), expected.float(), rtol=1e-5, atol=0)
    step = 2 * torch.finfo(torch.bfloat16).eps
    return bool(differing.float().mean() < 0.01 and torch.allclose(actual, expected, rtol=step, atol=0))


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()


_FORMULAS: dict[CastOrder, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    CastOrder.TO_INPUT_BEFORE_WEIGHT: lambda x, weight, eps: weight * _normalised(x, eps).to(x.dtype),
    CastOrder.TO_WEIGHT_BEFORE_WEIGHT: lambda x, weight, eps: weight * _normalised(x, eps).to(weight.dtype),
    CastOrder.AFTER_WEIGHT: lambda x, weight, eps: (weight.float() * _normalised(x, eps)).to(x.dtype),
}

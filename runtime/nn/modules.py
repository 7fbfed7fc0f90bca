"""Drop-in modules: torch's norms on generated kernels, and their forms with a fused residual add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..codegen.model import Norm
from ..errors import TransformError
from .functional import add_normalise, layer_norm, rms_norm, rms_norm_cast_before_weight


class _NotScripted:
    """What torch.jit.script cannot compile, and says so."""

    # torch.jit asks a module for this before it compiles it.
    def __prepare_scriptable__(self) -> NoReturn:
        raise TransformError(
            f"torch.jit.script cannot compile normforge.{type(self).__name__}; use torch.compile or torch.export, or "
            "torch.jit.trace, or script the model with torch's own norms (normforge.unpatch(model) restores them)"
        )


class LayerNorm(_NotScripted, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` with its forward and backward passes in generated kernels; see `layer_norm`.

    The constructor, parameters and state_dict are torch's.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise input: (..., *normalized_shape), fp16, bf16 or fp32; returns its shape and dtype."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(_NotScripted, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` with its forward and backward passes in generated kernels; see `rms_norm`.

    The constructor, parameters and state_dict are torch's, but for one option that is not stored in a state_dict.

    Args:
        normalized_shape: the input's last dimensions, or the last one.
        eps: added to the mean square; None is torch.finfo(torch.float32).eps.
        elementwise_affine: whether there is a weight.
        device: the weight's.
        dtype: the weight's.
        cast_before_weight: round to the input's dtype before the multiplication with the weight, as Hugging Face's
            `LlamaRMSNorm` does; the result has the wider of the two dtypes. By default the row is rounded once,
            after the multiplication.
    """

    # At class level for instances that `patch` made of torch's, which have none of their own.
    cast_before_weight = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        cast_before_weight: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.cast_before_weight = cast_before_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x: (..., *normalized_shape), fp16, bf16 or fp32; returns its shape."""
        if self.cast_before_weight and self.weight is not None:
            return rms_norm_cast_before_weight(x, self.normalized_shape, self.weight, self.eps)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        """torch's, and the option where it is on."""
        return super().extra_repr() + (", cast_before_weight=True" if self.cast_before_weight else "")


class AddLayerNorm(_NotScripted, torch.nn.LayerNorm):
    """A residual add and LayerNorm in one kernel: `add_layer_norm` with `torch.nn.LayerNorm`'s parameters."""

    # It is a torch.nn.LayerNorm so that what goes by that type (initialisation, weight decay) finds it.
    def forward(  # type: ignore[override]  # a residual comes in, and its sum goes out
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, in x's dtype, and that sum, in residual's; both of x's shape."""
        return add_normalise(Norm.LAYER, x, residual, self.normalized_shape, self.weight, self.bias, eps=self.eps)


class AddRMSNorm(_NotScripted, torch.nn.RMSNorm):
    """A residual add and RMSNorm in one kernel: `add_rms_norm` with `torch.nn.RMSNorm`'s parameters."""

    # It is a torch.nn.RMSNorm for the same reason.
    def forward(  # type: ignore[override]  # a residual comes in, and its sum goes out
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, in x's dtype, and that sum, in residual's; both of x's shape."""
        return add_normalise(Norm.RMS, x, residual, self.normalized_shape, self.weight, eps=self.eps)

"""The base classes of the modules of norms alone, which hold all but the constructors."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..calls import native
from ..calls.argument_checks import check_number
from ..codegen.parameters import FORWARD
from ..codegen.values import Cast
from ..dtypes import word
from ..errors import ConflictError
from .operands import Operands, Options
from .plain_calls import add_normalise, normalise, normalise_cast_before_weight, normalise_first
from .replaced import Replacing, own


class _Norm(Replacing):
    """The base class of the modules: the options that torch's modules lack."""

    normalized_shape: tuple[int, ...]
    weight: torch.nn.Parameter
    x_bias: torch.nn.Parameter | None

    # At class level for instances that `patch` made of torch's, which have none of their own.
    cast: str | Cast = "after_weight"
    weight_offset = 0.0
    _has_x_bias = False

    def _take(
        self, cast: str | Cast, weight_offset: float, x_bias: bool, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Keep what a constructor was given, once torch's has run."""
        self.cast, self.weight_offset = word(Cast, "cast", cast).value, weight_offset
        if weight_offset and self.weight is None:
            raise ConflictError(
                f"weight_offset={weight_offset} is added to weight and elementwise_affine=False leaves none; "
                "leave one of them out"
            )
        vector = torch.nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if x_bias else None
        self.register_parameter("x_bias", vector)
        if weight_offset or x_bias:
            self.reset_parameters()

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """torch's; what is assigned comes here too."""
        super().register_parameter(name, param)
        if name == "x_bias":
            self._has_x_bias = param is not None

    def reset_parameters(self) -> None:
        """torch's, where weight and weight_offset together are 1, and x_bias 0."""
        # Torch's norm, which follows in the order of each module's bases.
        norm: Any = super()
        norm.reset_parameters()
        if self.weight_offset and self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self._has_x_bias and self.x_bias is not None:
            torch.nn.init.zeros_(self.x_bias)

    def extra_repr(self) -> str:
        """torch's, and the options that are not the default."""
        options = {
            "cast": None if self.cast == _Norm.cast else self.cast,
            "weight_offset": self.weight_offset or None,
            "x_bias": self._has_x_bias or None,
        }
        said = [f"{name}={value}" for name, value in options.items() if value is not None]
        return ", ".join([super().extra_repr(), *said])


class PlainLayerNorm(_Norm, torch.nn.LayerNorm):
    """The base class of `LayerNorm`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise input: (..., *normalized_shape), fp16, bf16 or fp32; returns its shape and dtype."""
        x_bias = self.x_bias if self._has_x_bias else None
        options = ("layer", self.eps, self.weight_offset, None, self.cast)
        y: torch.Tensor | None
        if is_dynamo_compiling():
            operands = (input, self.weight, self.bias, None, x_bias)
            y = None
        else:
            operands = (input, own(self, "weight"), own(self, "bias"), None, x_bias)
            y = native.calls.recorded.normalise(operands, options, self.normalized_shape)
        if y is None:
            y = normalise_first(operands, self.normalized_shape, options, self)
        return y


class PlainRMSNorm(_Norm, torch.nn.RMSNorm):
    """The base class of `RMSNorm`."""

    # At class level for instances that `patch` made of torch's, which have none of their own.
    cast_before_weight = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x: (..., *normalized_shape), fp16, bf16 or fp32; returns its shape."""
        weight = self.weight if is_dynamo_compiling() else own(self, "weight")
        operands = (x, weight, None, None, self.x_bias if self._has_x_bias else None)
        y: torch.Tensor
        if self.cast_before_weight and weight is not None:
            options = ("rms", self.eps, self.weight_offset, None, "before_weight")
            y = normalise_cast_before_weight(operands, self.normalized_shape, options, self)
        else:
            y = normalise(operands, self.normalized_shape, ("rms", self.eps, self.weight_offset, None, self.cast), self)
        return y

    def extra_repr(self) -> str:
        """torch's, and the options that are on."""
        return super().extra_repr() + (", cast_before_weight=True" if self.cast_before_weight else "")


class _Adds(_Norm):
    """The base class of modules that add a residual, behind a dropout of x in training."""

    # At class level for the same reason as `_Norm`'s.
    dropout_p = 0.0

    def _drop(self, dropout_p: float) -> None:
        row = FORWARD["dropout_p"]
        self.dropout_p = check_number(row.name, dropout_p, least=row.least, most=row.most)

    def _vector(self, name: str) -> Any:
        return getattr(self, name) if is_dynamo_compiling() else own(self, name)

    def _add(self, operands: Operands, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        asked = (self.dropout_p if self.dropout_p and self.training else 0.0, None, False)
        both: tuple[torch.Tensor, torch.Tensor] = add_normalise(operands, self.normalized_shape, options, asked)
        return both

    def extra_repr(self) -> str:
        """torch's, and the options that are on."""
        return super().extra_repr() + (f", dropout_p={self.dropout_p}" if self.dropout_p else "")


class AddingLayerNorm(_Adds, torch.nn.LayerNorm):
    """The base class of `AddLayerNorm`."""

    # It is a torch.nn.LayerNorm so that what goes by that type (initialisation, weight decay) finds it.
    def forward(  # type: ignore[override]  # takes a residual, unlike torch's forward
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, in x's dtype, and that sum, in residual's; both of x's shape."""
        x_bias = self.x_bias if self._has_x_bias else None
        operands = (x, self._vector("weight"), self._vector("bias"), residual, x_bias)
        return self._add(operands, ("layer", self.eps, self.weight_offset, None, self.cast))


class AddingRMSNorm(_Adds, torch.nn.RMSNorm):
    """The base class of `AddRMSNorm`."""

    # It is a torch.nn.RMSNorm so that what goes by that type (initialisation, weight decay) finds it.
    def forward(  # type: ignore[override]  # takes a residual, unlike torch's forward
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, in x's dtype, and that sum, in residual's; both of x's shape."""
        x_bias = self.x_bias if self._has_x_bias else None
        operands = (x, self._vector("weight"), None, residual, x_bias)
        return self._add(operands, ("rms", self.eps, self.weight_offset, None, self.cast))

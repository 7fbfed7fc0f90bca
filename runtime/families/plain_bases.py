"""The base class of the modules of norms alone: the options that torch's modules lack."""

from __future__ import annotations

from typing import Any

import torch

from ..calls.check import check_number
from ..codegen.parameters import FORWARD
from ..codegen.values import Cast
from ..dtypes import word
from ..errors import ConflictError
from .operands import Operands, Options
from .plain_calls import add_normalise
from .replaced import Replacing


class PlainNorm(Replacing):
    """The base class of the modules: the options that torch's modules lack."""

    normalized_shape: tuple[int, ...]
    weight: torch.nn.Parameter
    x_bias: torch.nn.Parameter | None

    # At class level for instances that `patch` made of torch's, which have none of their own.
    cast: str | Cast = "after_weight"
    weight_offset = 0.0
    cast_before_weight = False
    dropout_p = 0.0
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

    def _drop(self, dropout_p: float) -> None:
        row = FORWARD["dropout_p"]
        self.dropout_p = check_number(row.name, dropout_p, least=row.least, most=row.most)

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

    def _add(self, operands: Operands, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a residual, behind a dropout of x in training, and normalise the sum."""
        asked = (self.dropout_p if self.dropout_p and self.training else 0.0, None, False)
        both: tuple[torch.Tensor, torch.Tensor] = add_normalise(operands, self.normalized_shape, options, asked)
        return both

    def extra_repr(self) -> str:
        """torch's, and the options that are not the default."""
        options = {
            "cast": self.cast if self.cast != PlainNorm.cast else None,
            "weight_offset": self.weight_offset,
            "x_bias": self._has_x_bias,
            "cast_before_weight": self.cast_before_weight,
            "dropout_p": self.dropout_p,
        }
        return ", ".join([super().extra_repr(), *[f"{name}={value}" for name, value in options.items() if value]])

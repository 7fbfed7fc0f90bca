"""The modules that `patch` swaps in for Hugging Face's RMSNorm classes; `probing` finds each class's formula."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..codegen.values import Cast
from ..compiled.rules import is_left_to_inductor
from ..dtypes import HALVES
from ..families.plain_calls import normalise, normalise_cast_before_weight
from ..families.plain_modules import RMSNorm
from ..families.plainly import is_plain
from ..families.replaced import ORIGINAL, own


class CastOrder(Enum):
    """When the normalised row is rounded, and by what it is multiplied; the value names a model family that does so."""

    TO_INPUT_BEFORE_WEIGHT = "Llama"
    TO_WEIGHT_BEFORE_WEIGHT = "T5"
    AFTER_WEIGHT = "Olmo2"
    AFTER_OFFSET_WEIGHT = "Gemma"

    @property
    def rounds_first(self) -> bool:
        """True if rows are rounded before they are multiplied by the weight."""
        return self in (CastOrder.TO_INPUT_BEFORE_WEIGHT, CastOrder.TO_WEIGHT_BEFORE_WEIGHT)

    @property
    def weight_offset(self) -> float:
        """The number that is added to the weight."""
        return 1.0 if self is CastOrder.AFTER_OFFSET_WEIGHT else 0.0


# The key of an epsilon that the module itself calls eps, which is a property here: TorchDynamo of torch 2.11 takes an
# entry of `__dict__` for the attribute of that name, and follows the property from itself into itself.
EPSILON = "_epsilon"

# The length of rows in a normalized_shape where every length is taken.
ANY_LENGTH = -1


class HuggingFaceRMSNorm(RMSNorm):
    """RMSNorm as Hugging Face's `LlamaRMSNorm`, `Olmo2RMSNorm` and `GemmaRMSNorm`, for modules made by such a class.

    With cast_before_weight it is Llama's, without it Olmo2's, or with a weight_offset Gemma's; see `RMSNorm`. The
    module's own epsilon is read in each call, so that it may be changed. Without a weight rows may have any length, as
    those of `Llama4TextL2Norm`.

    Attributes:
        epsilon_name: the attribute that epsilon is under; never "eps", see `EPSILON`.
        input_name: the input's name when it is passed by keyword.
    """

    epsilon_name: str
    input_name: str

    @property
    def eps(self) -> float:
        """The number that is added to the mean square."""
        value: float = self.__dict__[self.epsilon_name]
        return value

    @eps.setter
    def eps(self, value: float) -> None:
        # Under its own name too, for when patch is undone.
        for name in {self.epsilon_name, *(["eps"] if "eps" in self.__dict__ else [])}:
            self.__dict__[name] = value

    def forward(self, x: torch.Tensor | None = None, **named: torch.Tensor) -> torch.Tensor:
        """Normalise x: (..., *normalized_shape), fp16, bf16 or fp32; returns its shape.

        Raises:
            TypeError: there is not one input, or it has another name than input_name.
        """
        rows = x if x is not None and not named else self._only(x, named)
        weight, shape = self._vector(rows)
        options = ("rms", self.__dict__[self.epsilon_name], self.weight_offset, *self._rounded(weight))
        operands = (rows, weight, None, None, None)
        y: torch.Tensor
        if (
            is_dynamo_compiling()
            and is_plain(operands, shape, options)
            and is_left_to_inductor("rms", rows, tuple(shape), scaled=weight is not None)
            and self.__dict__[ORIGINAL].asked
        ):
            # The graph equals the unpatched model's.
            y = self.__dict__[ORIGINAL].cls.forward(self, rows)
        else:
            y = (normalise_cast_before_weight if self.cast_before_weight else normalise)(operands, shape, options, self)
        return y

    def forward_before(self, x: torch.Tensor) -> Callable[..., Any] | None:
        """Return `Replacing`'s, rounded to the dtype of y where `patch` was asked to round once."""
        forward = super().forward_before(x)
        if forward is None or self.__dict__[ORIGINAL].asked:
            return forward
        dtype = self._rounded(self.weight)[0] or x.dtype
        return lambda module, x, before=forward: before(module, x).to(dtype)

    def _rounded(self, weight: torch.Tensor | None) -> tuple[torch.dtype | None, str | Cast]:
        """Return the dtype of y, or None for the function's default, and the cast."""
        return None, "before_weight" if self.cast_before_weight else self.cast

    def _vector(self, rows: torch.Tensor) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        """Return the weight, and the dimensions that are normalised together."""
        weight = self.weight if is_dynamo_compiling() else own(self, "weight")
        if weight is None:
            return None, rows.shape[-1:]
        # Compiled code looks at the weight's shape in any case.
        return weight, weight.shape if is_dynamo_compiling() else self.normalized_shape

    def _only(self, x: torch.Tensor | None, named: dict[str, torch.Tensor]) -> torch.Tensor:
        if x is not None or set(named) != {self.input_name}:
            got = [*([] if x is None else ["a tensor"]), *(f"{name}=..." for name in named)]
            raise TypeError(
                f"{type(self).__name__}.forward() got ({', '.join(got)}); it takes one tensor, by position or as "
                f"{self.input_name}"
            )
        return named[self.input_name]

    def extra_repr(self) -> str:
        """Return torch's text, and the options that are on."""
        if self.weight is None:
            return f"eps={self.eps}, elementwise_affine=False"
        option = ", cast_before_weight=True" if self.cast_before_weight else ""
        option += f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine=True{option}"


class T5RMSNorm(HuggingFaceRMSNorm):
    """RMSNorm as Hugging Face's `T5LayerNorm`: rounded to the weight's dtype, which is also the result's.

    With cast_before_weight (as there), rounded before the multiplication with the weight, else once, after it.
    """

    def _rounded(self, weight: torch.Tensor | None) -> tuple[torch.dtype | None, str | Cast]:
        assert weight is not None
        return weight.dtype, "before_weight" if self.cast_before_weight and weight.dtype in HALVES else self.cast

"""The modules that `patch` swaps in for Hugging Face's RMSNorm classes; `probing` finds each class's formula."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..calls.backend import is_served
from ..codegen.values import Cast
from ..compiled.rules import is_left_to_inductor
from ..dtypes import HALVES
from ..families.functional import gated_rms_norm
from ..families.plain_calls import is_plain, normalise, normalise_cast_before_weight
from ..families.plain_modules import RMSNorm, UpcastLayerNorm
from ..families.replaced import ORIGINAL, Replacing, own


class CastOrder(Enum):
    """How a row is normalised, when it is rounded, and by what it is multiplied.

    The value names a model family that does so.
    """

    TO_INPUT_BEFORE_WEIGHT = "Llama"
    TO_WEIGHT_BEFORE_WEIGHT = "T5"
    AFTER_WEIGHT = "Olmo2"
    AFTER_OFFSET_WEIGHT = "Gemma"
    CENTRED = "Cohere"

    @property
    def rounds_first(self) -> bool:
        """True if rows are rounded before they are multiplied by the weight."""
        return self in (CastOrder.TO_INPUT_BEFORE_WEIGHT, CastOrder.TO_WEIGHT_BEFORE_WEIGHT)

    @property
    def weight_offset(self) -> float:
        """The number that is added to the weight."""
        return 1.0 if self is CastOrder.AFTER_OFFSET_WEIGHT else 0.0


# Activations of gates, by the words of `gated_rms_norm`.
ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}

# The key of an epsilon that the module itself calls eps, which is a property here: TorchDynamo of torch 2.11 takes an
# entry of `__dict__` for the attribute of that name, and follows the property from itself into itself.
EPSILON = "_epsilon"

# The length of rows in a normalized_shape where every length is taken.
ANY_LENGTH = -1


class _OwnNames(Replacing):
    """A norm that reads epsilon under the name that the module has for it, and takes its input by the forward's name.

    Epsilon is read in each call, so that it may be changed.

    Attributes:
        epsilon_name: the attribute that epsilon is under; never "eps", see `EPSILON`.
        input_name: the input's name when it is passed by keyword.
    """

    epsilon_name: str
    input_name: str

    @property
    def eps(self) -> Any:
        """The number that is added to the mean square."""
        return self.__dict__[self.epsilon_name]

    @eps.setter
    def eps(self, value: Any) -> None:
        # Under its own name too, for when patch is undone.
        for name in {self.epsilon_name, *(["eps"] if "eps" in self.__dict__ else [])}:
            self.__dict__[name] = value

    def _only(self, x: torch.Tensor | None, named: dict[str, torch.Tensor]) -> torch.Tensor:
        if x is not None or set(named) != {self.input_name}:
            got = [*([] if x is None else ["a tensor"]), *(f"{name}=..." for name in named)]
            raise TypeError(
                f"{type(self).__name__}.forward() got ({', '.join(got)}); it takes one tensor, by position or as "
                f"{self.input_name}"
            )
        return named[self.input_name]


class HuggingFaceRMSNorm(_OwnNames, RMSNorm):
    """RMSNorm as Hugging Face's `LlamaRMSNorm`, `Olmo2RMSNorm` and `GemmaRMSNorm`, for modules made by such a class.

    With cast_before_weight it is Llama's, without it Olmo2's, or with a weight_offset Gemma's; see `RMSNorm`. Without a
    weight rows may have any length, as those of `Llama4TextL2Norm`.
    """

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


class HuggingFaceLayerNorm(_OwnNames, UpcastLayerNorm):
    """LayerNorm with a weight alone, as Hugging Face's `CohereLayerNorm`; y has x's dtype under torch.autocast too."""

    def forward(self, input: torch.Tensor | None = None, **named: torch.Tensor) -> torch.Tensor:
        """Normalise input: (..., *normalized_shape), fp16, bf16 or fp32; returns its shape and dtype.

        Raises:
            TypeError: there is not one input, or it has another name than input_name.
        """
        return UpcastLayerNorm.forward(self, input if input is not None and not named else self._only(input, named))


class HuggingFaceGatedRMSNorm(_OwnNames):
    """RMSNorm and an activated gate, as Hugging Face's `Qwen3NextRMSNormGated`, or `MambaRMSNormGated` of groups.

    With cast_before_weight, as in both, rows are rounded before the weight: a kernel computes the norm, and torch's
    operators what follows. Without it one kernel computes all, and rounds once.

    Attributes:
        activation: of the gate, "silu" or "sigmoid".
        norm_before_gate: False if the gate is multiplied by the input, and not by the norm's result.
        cast_before_weight: whether rows are rounded before the weight.
    """

    weight: torch.nn.Parameter
    activation: str
    norm_before_gate: bool
    cast_before_weight: bool

    def forward(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Normalise x with the gate: both (..., N), fp16, bf16 or fp32.

        The forward that the module had is called for what kernels do not take, and traced.
        """
        tensors = {**dict(zip((self.input_name, "gate"), args, strict=False)), **named}
        x, gate = tensors.get(self.input_name), tensors.get("gate")
        is_known = len(args) + len(named) == 2 == len(tensors) and self.activation in ACTIVATIONS
        if is_dynamo_compiling() or x is None or gate is None or not is_known or not is_served((x, gate, self.weight)):
            # Under batch invariance `forward_before` refuses what kernels do not take.
            before = None if is_dynamo_compiling() or x is None else self.forward_before(x)
            y: torch.Tensor = (before or self.__dict__[ORIGINAL].cls.forward)(self, *args, **named)
            return y
        options: dict[str, Any] = {
            "activation": self.activation,
            "norm_before_gate": self.norm_before_gate,
            "group_size": self.__dict__.get("group_size"),
            "eps": self.eps,
        }
        if not self.cast_before_weight:
            return gated_rms_norm(x, gate, self.weight, **options)
        if not self.norm_before_gate:
            return self.weight * gated_rms_norm(x, gate, **options)
        rounding = ("rms", self.eps, 0.0, None, "before_weight")
        rows: torch.Tensor
        rows = normalise_cast_before_weight((x, self.weight, None, None, None), self.weight.shape, rounding)
        return (rows * ACTIVATIONS[self.activation](gate.float())).to(x.dtype)

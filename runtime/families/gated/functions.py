"""Modules of norms times an activated gate, as in state-space models (Mamba2)."""

from __future__ import annotations

from typing import Any

import torch

from ...calls.argument_checks import check_flag
from ...codegen.values import GateActivation
from ...dtypes import word
from ...errors import ShapeError
from ..functional import gated_layer_norm, gated_rms_norm
from ..replaced import Replacing
from . import row

# Attributes that are arguments of the functions, with what printed modules leave out.
_OPTIONS = {"group_size": None, "norm_before_gate": True, "activation": "silu"}


class _GatedNorm(Replacing):
    """The base class of both modules: a weight of ones, and the options of the function."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int | None,
        norm_before_gate: bool,
        activation: str | GateActivation,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.group_size = hidden_size, eps, group_size
        self.norm_before_gate = check_flag("norm_before_gate", norm_before_gate)
        self.activation = word(GateActivation, "activation", activation).value
        if group_size is not None and not row.divides(group_size, hidden_size):
            raise ShapeError(f"group_size={group_size!r} and hidden_size={hidden_size}; it takes a divisor of that")
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the weight to ones, and the bias to zeros if there is one."""
        torch.nn.init.ones_(self.weight)
        if (bias := self._parameters.get("bias")) is not None:
            torch.nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        """Return the size, epsilon, and the options that differ from their defaults."""
        others = [
            f"{name}={getattr(self, name)!r}" for name, default in _OPTIONS.items() if getattr(self, name) != default
        ]
        return ", ".join([str(self.hidden_size), f"eps={self.eps}", *others])

    @property
    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, **{name: getattr(self, name) for name in _OPTIONS}}


class GatedRMSNorm(_GatedNorm):
    """`gated_rms_norm` with a weight: the RMSNormGated of Mamba2 and Gated DeltaNet, whose state dicts it loads.

    Args:
        hidden_size: N.
        eps: added to the mean square; Mamba2 has 1e-5.
        group_size: the number of adjacent columns that are normalised together, each such group of a row by itself; a
            divisor of N. None is N.
        norm_before_gate: True multiplies the normalised rows by the activated gate; False multiplies x by the activated
            gate, and normalises the product. Mamba2 has False.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        device: the device of the weight.
        dtype: the dtype of the weight.

    Raises:
        ShapeError: group_size does not divide hidden_size.
        ConflictError: activation is no such word, or norm_before_gate no flag.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        *,
        activation: str | GateActivation = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, activation, device, dtype)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise x, and multiply by the activated gate before or after; x and gate are (..., hidden_size)."""
        return gated_rms_norm(x, gate, self.weight, **self._options)


class GatedLayerNorm(_GatedNorm):
    """`gated_layer_norm` with a weight and, unless it is left out, a bias.

    Args:
        hidden_size: N.
        eps: added to the variance.
        group_size: the number of adjacent columns that are normalised together, each such group of a row by itself; a
            divisor of N. None is N.
        norm_before_gate: True multiplies the normalised rows by the activated gate; False multiplies x by the activated
            gate, and normalises the product.
        bias: True adds a bias.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ShapeError: group_size does not divide hidden_size.
        ConflictError: activation is no such word, or norm_before_gate no flag.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        *,
        bias: bool = True,
        activation: str | GateActivation = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, activation, device, dtype)
        vector = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", vector)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise x, and multiply by the activated gate before or after; x and gate are (..., hidden_size)."""
        return gated_layer_norm(x, gate, self.weight, self.bias, **self._options)

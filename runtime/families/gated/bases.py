"""The base classes of the modules of gated norms, which hold all but the signatures."""

from __future__ import annotations

from typing import Any

import torch

from ...calls.check import check_flag
from ...codegen.values import GateActivation
from ...dtypes import word
from ...errors import ShapeError
from ..replaced import Replacing
from . import row

# Attributes that are arguments of the functions, with what printed modules leave out.
_OPTIONS = {"group_size": None, "norm_before_gate": True, "activation": "silu"}


class PlainGatedNorm(Replacing):
    """The base class of both modules: a weight of ones, and the options of the function."""

    # Only that of LayerNorm.
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int | None,
        norm_before_gate: bool,
        activation: str | GateActivation,
        device: Any,
        dtype: torch.dtype | None,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps, self.group_size = hidden_size, eps, group_size
        self.norm_before_gate = check_flag("norm_before_gate", norm_before_gate)
        self.activation = word(GateActivation, "activation", activation).value
        if group_size is not None and not row.divides(group_size, hidden_size):
            raise ShapeError(f"group_size={group_size!r} and hidden_size={hidden_size}; it takes a divisor of that")
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        if bias is not None:
            vector = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
            self.register_parameter("bias", vector)
        self.reset_parameters()

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

"""TorchTitan: overrides of its norms' configurations, for `--override.imports`.

Importing this module registers the overrides; TorchTitan applies the overrides that its command line names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.config import derive
from torchtitan.config import override as _override
from torchtitan.models.common import nn_modules

from ..families.plain_functions import layer_norm as _layer_norm
from ..families.plain_functions import rms_norm as _rms_norm

if TYPE_CHECKING:
    # TorchTitan is not there where types are checked; its norms are subclasses of torch's with a configuration each.
    from torch.nn import LayerNorm as _LayerNorm
    from torch.nn import RMSNorm as _RMSNorm

    _LayerNormConfig = object
    _RMSNormConfig = object
else:
    _LayerNorm, _RMSNorm = nn_modules.LayerNorm, nn_modules.RMSNorm
    _LayerNormConfig, _RMSNormConfig = _LayerNorm.Config, _RMSNorm.Config


class RMSNorm(_RMSNorm):
    """TorchTitan's RMSNorm on generated kernels, forward and backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(_RMSNormConfig):
        """The fields are those of TorchTitan's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of x: (..., *normalized_shape); see `normforge.rms_norm`."""
        return _rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LayerNorm(_LayerNorm):
    """TorchTitan's LayerNorm on generated kernels, forward and backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(_LayerNormConfig):
        """The fields are those of TorchTitan's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the LayerNorm of input: (..., *normalized_shape); see `normforge.layer_norm`."""
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _registered(norm: Any, name: str) -> Callable[[Any], Any]:
    """Register an override of TorchTitan's own norm, not of classes derived from the norm, and return its factory."""
    target = next(base.Config for base in norm.__mro__[1:] if "Config" in vars(base))

    def factory(cfg: Any) -> Any:
        return derive(cfg, norm.Config) if type(cfg) is target else cfg

    # The name of the override in --override.imports.
    factory.__name__ = factory.__qualname__ = name
    described = {"target": target, "description": f"{norm.__name__} by normforge's kernels"}
    # Releases before 0.3 require a name for each override.
    named = ("normforge_" + name,) if "name" in signature(_override).parameters else ()
    registered: Callable[[Any], Any] = _override(*named, **described)(factory)
    return registered


rms_norm = _registered(RMSNorm, "rms_norm")
layer_norm = _registered(LayerNorm, "layer_norm")

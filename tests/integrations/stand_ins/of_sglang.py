"""SGLang's registry of hooks, and its norms.

After sgl-project/sglang's python/sglang/srt/plugins/hook_registry.py at 106f37cea63a70dea91958cb633ccbd87c932d40, and
python/sglang/srt/layers/layernorm.py and kernels/fused_op.py of its release 0.5.23.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from . import Group, all_reduced, install

LAYERS = "sglang.srt.layers.layernorm"


class HookType(Enum):
    """The kinds of hooks, of which only this one is stood in for."""

    AROUND = "around"


class HookRegistry:
    """Hooks by their targets' dotted names; applied, each stands in its target's place."""

    hooks: dict[str, Callable[..., Any]]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType, *, source: Any = None) -> None:
        if isinstance(hook, type):
            raise TypeError(f"{hook.__name__} is a class")
        assert hook_type is HookType.AROUND
        assert target not in cls.hooks
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.hooks.items():
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, _wrapped(getattr(owner, name), hook))


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return hook(original, *arguments, **named)

    return wrapper


def modules() -> dict[str, dict[str, Any]]:
    """The modules, of fresh classes: hooks change them."""
    registry = type("HookRegistry", (HookRegistry,), {"hooks": {}})

    class FusedOp(torch.nn.Module):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            # Looked up when it is first called, after hooks are applied.
            if "_forward_method" not in vars(self):
                vars(self)["_forward_method"] = self.forward_cuda
            return vars(self)["_forward_method"](*arguments, **named)

    class RMSNorm(FusedOp):
        _quant_linear: Any = None

        def __init__(
            self,
            hidden_size: int,
            eps: float = 1e-6,
            var_hidden_size: int | None = None,
            cast_x_before_out_mul: bool = False,
            fp32_residual: bool = False,
            has_weight: bool = True,
            weight_dtype: torch.dtype | None = None,
        ) -> None:
            super().__init__()
            self.has_weight, self.cast_x_before_out_mul = has_weight, cast_x_before_out_mul
            self.fp32_residual, self.override_orig_dtype = fp32_residual, None
            ones = torch.ones(hidden_size, dtype=weight_dtype)
            self.weight = torch.nn.Parameter(ones) if has_weight else ones
            self.variance_epsilon, self.hidden_size = eps, hidden_size
            self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size

        forward_with_allreduce_fusion = _apart

        def forward_cuda(
            self, x: Any, residual: Any = None, post_residual_addition: Any = None, quant_linear: Any = None
        ) -> Any:
            rows = x.float()
            for added in (residual, post_residual_addition):
                rows = rows if added is None else rows + added.float()
            of = rows if self.variance_size_override is None else rows[..., : self.variance_size_override]
            y = rows * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            y = self.weight.data * y.to(x.dtype) if self.cast_x_before_out_mul else (y * self.weight.data).to(x.dtype)
            return y if residual is None else (y, rows if self.fp32_residual else rows.to(x.dtype))

    class GemmaRMSNorm(FusedOp):
        forward_with_allreduce_fusion = _apart

        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
            self.variance_epsilon = eps

        def forward_cuda(self, x: Any, residual: Any = None, post_residual_addition: Any = None) -> Any:
            return _gemma(self.weight, self.variance_epsilon, x, residual)

    class Gemma3RMSNorm(FusedOp):
        def __init__(self, dim: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(dim))
            self.eps = eps

        # As of releases that had no residual here.
        def forward_cuda(self, x: Any) -> Any:
            return _gemma(self.weight, self.eps, x, None)

    class LayerNorm(FusedOp):
        def __init__(
            self,
            hidden_size: int,
            eps: float = 1e-6,
            elementwise_affine: bool = True,
            bias: bool = True,
            dtype: torch.dtype = torch.float32,
        ) -> None:
            super().__init__()
            self.hidden_size, self.variance_epsilon, self.dtype = hidden_size, eps, dtype
            self.elementwise_affine, self.use_bias = elementwise_affine, bias
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype))

        def forward_cuda(self, x: Any) -> Any:
            weight = self.weight if self.elementwise_affine else None
            bias = self.bias if self.use_bias else None
            rows = x.to(self.dtype)
            return functional.layer_norm(rows, (self.hidden_size,), weight, bias, self.variance_epsilon).to(x.dtype)

    norms = {cls.__name__: cls for cls in (RMSNorm, GemmaRMSNorm, Gemma3RMSNorm, LayerNorm)}
    return {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "sglang.srt.distributed": {
            "get_tp_group": Group,
            "get_attn_tensor_model_parallel_world_size": lambda: Group().world_size,
            "get_moe_tensor_parallel_world_size": lambda: Group().world_size,
            "get_moe_expert_parallel_world_size": lambda: 1,
        },
        LAYERS: {**norms, "is_batch_invariant_mode_enabled": lambda: False, "get_exec": executed},
    }


def _apart(
    norm: Any, x: Any, residual: Any = None, post_residual_addition: Any = None, use_attn_tp_group: bool = True
) -> Any:
    return norm(all_reduced(x), residual, post_residual_addition)


def executed(trainer: str | None = None) -> Any:
    """What a server was told of how it executes."""
    return SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=trainer))


def _gemma(weight: Any, eps: float, x: Any, residual: Any) -> Any:
    rows = x.float() if residual is None else x.float() + residual.float()
    y = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), rows.to(x.dtype))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have these be SGLang."""
    install(monkeypatch, modules())

"""SGLang: hooks around the norms of `sglang.srt.layers.layernorm`, which fall back to SGLang's own forward.

Through the entry point `sglang.srt.plugins` every process of SGLang calls `register`.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..selection.batch import follow
from ..settings import lists_us
from .serving import fits, layer, reduced, rms

logger = logging.getLogger("normforge")

# SGLang's own list of the plugins that are to run; without one, all run.
VARIABLE = "SGLANG_PLUGINS"
# The option that turns SGLang's batch-invariant mode on, once models are made.
SWITCH = "--enable-deterministic-inference"

_LAYERS = "sglang.srt.layers.layernorm"

Norm = Callable[..., Any]


def register() -> None:
    """Register the hooks, if SGLANG_PLUGINS names normforge; SGLang applies them next.

    Without the name nothing changes: normforge may be installed for another purpose.
    """
    if not lists_us(VARIABLE):
        logger.info("normforge is installed and serves no norm of SGLang's: %s does not name it", VARIABLE)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    served: dict[str, None] = {}
    for name, serve in _SERVED.items():
        target = f"{_LAYERS}.{name}"
        if _is_there(target):
            HookRegistry.register(target, partial(_around, serve), HookType.AROUND)
            served[name.partition(".")[0]] = None
    logger.info("normforge serves in SGLang: %s", ", ".join(served) or "nothing, none of its norms is there")


def _is_there(target: str) -> bool:
    try:
        return callable(pkgutil.resolve_name(target))
    except (ImportError, AttributeError):
        return False


def _around(serve: Norm, original: Callable[..., Any], norm: Any, *arguments: Any, **named: Any) -> Any:
    """Call a norm's forward by a kernel, or else by the original with the same arguments."""
    # torch.compile traces SGLang's own operators here, which SGLang's passes recognise.
    if not is_dynamo_compiling() and _serves_as_asked():
        result = serve(norm, *arguments, **named)
        if result is not None:
            return result
    return original(norm, *arguments, **named)


def _forward(
    serve: Norm, norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, *others: Any, **named: Any
) -> Any:
    if x.numel() == 0 or any(other is not None for other in (*others, *named.values())):
        return None
    return serve(norm, x, residual)


def _behind_all_reduce(
    asks: Norm,
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    added: Any = None,
    use_attn_tp_group: bool = True,
) -> Any:
    """Return the norm of a sum over ranks, where those are the tensor-parallel group's, and the sum with a residual."""
    asked, group = asks(norm, x), _group(of_attention=use_attn_tp_group)
    if asked is None or group is None or residual is None or added is not None:
        return None
    weight, options = asked
    if not fits(x, weight, residual=residual):
        return None
    found = reduced("SGLang", group, x, residual, weight, **options)
    return None if found is None else found[:2]


def _group(*, of_attention: bool) -> Any:
    """Return the tensor-parallel group, if SGLang adds up over all of its ranks; None if over others."""
    try:
        from sglang.srt import distributed

        if of_attention:
            size = distributed.get_attn_tensor_model_parallel_world_size()
        else:
            size = distributed.get_moe_expert_parallel_world_size()
            size = size if size > 1 else distributed.get_moe_tensor_parallel_world_size()
        group = distributed.get_tp_group()
    except (ImportError, AttributeError):
        # Another release has them elsewhere.
        return None
    return group.device_group if group.world_size == size > 1 else None


def _serves_as_asked() -> bool:
    """Return True if kernels can return the bits that SGLang asks for; turn batch invariance on with SGLang's."""
    layers: Any = sys.modules.get(_LAYERS)
    asked = getattr(layers, "is_batch_invariant_mode_enabled", None)
    if asked is None or not asked():
        return True
    try:
        trainer = layers.get_exec().deterministic.rl_on_policy_target
    except (AttributeError, ValueError):
        # Another release has the setting elsewhere, or the process has none.
        return False
    if trainer is not None:
        # SGLang asks for the bits of a trainer's norms.
        return False
    follow(SWITCH)
    return True


# Attributes that not every release has, and the values under which a norm is the plain one.
_PLAIN = {"variance_size_override": None, "fp32_residual": False, "override_orig_dtype": None, "_quant_linear": None}


def _rms(norm: Any, x: torch.Tensor) -> Any:
    """Return a norm's weight and options; None if no kernel computes the norm."""
    weight: Any = norm.weight.data if getattr(norm, "has_weight", True) else None
    rounds_first = getattr(norm, "cast_x_before_out_mul", False) and weight is not None
    # A product of a rounded row and a wider weight has the weight's dtype.
    is_wider = rounds_first and weight.dtype is not x.dtype
    if is_wider or any(getattr(norm, name, plain) is not plain for name, plain in _PLAIN.items()):
        return None
    cast = "before_weight" if rounds_first and x.dtype is not torch.float32 else "after_weight"
    return weight, {"eps": norm.variance_epsilon, "cast": cast}


def _gemma(eps: str, norm: Any, _: torch.Tensor) -> Any:
    return norm.weight.data, {"eps": getattr(norm, eps), "weight_offset": 1.0}


def _alone(asks: Norm, norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
    asked = asks(norm, x)
    return None if asked is None else rms("SGLang", x, asked[0], residual, **asked[1])


def _layer(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
    weight = norm.weight.data if norm.elementwise_affine else None
    bias = norm.bias.data if norm.use_bias else None
    # SGLang's LayerNorm computes in its own dtype, and rounds x to a narrower one.
    if norm.dtype not in (x.dtype, torch.float32) or residual is not None:
        return None
    return layer("SGLang", x, weight, bias, eps=norm.variance_epsilon)


_RMS: dict[str, Norm] = {
    "RMSNorm": _rms,
    "GemmaRMSNorm": partial(_gemma, "variance_epsilon"),
    "Gemma3RMSNorm": partial(_gemma, "eps"),
}
# By method; SGLang calls the last one's in place of an all-reduce and the norm.
_SERVED: dict[str, Norm] = {
    **{f"{name}.forward_cuda": partial(_forward, partial(_alone, asks)) for name, asks in _RMS.items()},
    "LayerNorm.forward_cuda": partial(_forward, _layer),
    **{f"{name}.forward_with_allreduce_fusion": partial(_behind_all_reduce, asks) for name, asks in _RMS.items()},
}

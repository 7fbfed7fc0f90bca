"""vLLM: providers of its IR's RMSNorms, and a class in place of its LayerNorm; see `vllm_quantised` for quantisation.

Through the entry point `vllm.general_plugins` every process of vLLM calls `register`. vLLM reads annotations when it
registers providers, so that this module has no annotations as strings.
"""

import logging
import sys
from typing import Any

import torch
from torch import Tensor

from ..calls.backend import backend
from ..settings import lists_us
from ..upstream.imports import when_imported
from .serving import cast_of, fits, follow_switch, layer, rms
from .vllm_quantised import SWITCH, maybe_fused_norm_quant

__all__ = ["maybe_fused_norm_quant", "register"]

# A child of vLLM's, whose handlers show it.
logger = logging.getLogger("vllm.normforge")

# Our name in --kernel-config and --ir-op-priority.
PROVIDER = "normforge"
# vLLM's own list of the plugins that are to run; without one, all run.
VARIABLE = "VLLM_PLUGINS"

_LAYERS = "vllm.model_executor.layers.layernorm"


def register() -> None:
    """Register providers, which serve once a priority names them, and LayerNorm, if VLLM_PLUGINS names normforge.

    A second call registers nothing twice. Under VLLM_BATCH_INVARIANT all kernels of the process are batch invariant
    from here on.
    """
    if follow_switch(SWITCH):
        logger.info("normforge's kernels are batch invariant: %s is on", SWITCH)
    offered = _offer()
    if offered:
        logger.info("normforge offers providers of vLLM IR's %s; a priority chooses them", " and ".join(offered))
    else:
        logger.info("normforge offers no providers: this vLLM has no IR of RMSNorm")
    if lists_us(VARIABLE):
        when_imported(_LAYERS, _swap_layer_norm)
    else:
        logger.info("normforge leaves vLLM's LayerNorm alone: %s does not name it", VARIABLE)


# Providers


def _offer() -> list[str]:
    """Register the providers of the operators that this vLLM has, and return their names."""
    try:
        from vllm.ir import ops
        from vllm.platforms import current_platform
    except ImportError:
        return []
    offered = []
    supported = current_platform.is_cuda_alike() or backend(torch.empty(0)) == "kernel"
    for provide, supports in ((rms_norm, _supports), (fused_add_rms_norm, _supports_add)):
        op = getattr(ops, provide.__name__, None)
        if op is None:
            continue
        if PROVIDER not in op.impls:
            try:
                op.register_impl(PROVIDER, supported=supported, supports_args=supports)(provide)
            except (AssertionError, TypeError, ValueError) as error:
                # Another release's operator: vLLM has to start all the same.
                logger.warning("normforge provides no %s for this vLLM: %s", provide.__name__, error)
                continue
        offered.append(provide.__name__)
    return offered


def _supports(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and fits(x, weight)


def _supports_add(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and fits(x, weight, residual=x_residual)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Compute `rms_norm` of vLLM's IR for calls that `supports_args` takes; fall back to the native implementation."""
    y: Tensor | None = rms("vLLM", x, weight, eps=epsilon, cast=cast_of(weight))
    return _native("rms_norm")(x, weight, epsilon, variance_size) if y is None else y


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `fused_add_rms_norm` of vLLM's IR; both results are new tensors."""
    both: tuple[Tensor, Tensor] | None = rms("vLLM", x, weight, x_residual, eps=epsilon, cast=cast_of(weight))
    return both or _native("fused_add_rms_norm")(x, x_residual, weight, epsilon, variance_size)


def _native(name: str) -> Any:
    from vllm.ir import ops

    return getattr(ops, name).impls["native"].impl_fn


# LayerNorm


def _swap_layer_norm() -> None:
    """Register our class in place of vLLM's LayerNorm, which is no operator of vLLM's IR."""
    from vllm.model_executor import custom_op

    theirs: Any = getattr(sys.modules[_LAYERS], "LayerNorm", None)
    if not (isinstance(theirs, type) and issubclass(theirs, custom_op.CustomOp)):
        logger.info("normforge serves no LayerNorm: this vLLM's is none of its custom operators")
        return
    name = theirs.__name__
    if name in custom_op.op_registry_oot:
        other = custom_op.op_registry_oot[name]
        if other.__module__ != __name__:
            logger.warning("normforge serves no LayerNorm: %s.%s does", other.__module__, other.__name__)
        return

    @custom_op.CustomOp.register_oot(name=name)
    class NormforgeLayerNorm(theirs):  # type: ignore[misc]  # vLLM is not there where types are checked
        """Its LayerNorm on a generated kernel."""

        def forward_cuda(self, x: Tensor) -> Tensor:
            """Return the LayerNorm of x: (..., hidden_size); fall back to vLLM's own forward."""
            normalised = layer("vLLM", x, self.weight, self.bias, eps=self.eps)
            y: Tensor = super().forward_cuda(x) if normalised is None else normalised
            return y

    # The word that switches it in --compilation-config; registering made it the class's.
    NormforgeLayerNorm.name = getattr(theirs, "name", name)
    logger.info("normforge serves vLLM's LayerNorm")

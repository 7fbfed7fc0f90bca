"""For vLLM: norms that quantise for the linear layer behind them, as vLLM's own operators do it one after the other.

Between norm and quantisation vLLM has rows of 16 bits, in memory or in the registers of its fused kernels: rows are
rounded before the weight and again before they are quantised, and so are these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.outputs import QuantisedOutput
from ..families.public import quantised_layer_norm, quantised_rms_norm
from .serving import cast_of, fits, follow_switch, served

# vLLM's own switch of batch invariance.
SWITCH = "VLLM_BATCH_INVARIANT"

_WHOSE = "normforge leaves a norm and its quantisation to vLLM"

Options = dict[str, Any]
Vectors = tuple[Tensor | None, ...]
Quantises = Callable[..., QuantisedOutput]


def maybe_fused_norm_quant(norm: Any, x: Tensor, linear: Any, residual: Tensor | None = None) -> Any:
    """A norm, with the quantisation of the linear layer behind it in the same kernel if that takes quantised rows.

    For models written for vLLM, as its own `maybe_fused_act_quant` is: whatever the linear layer takes, it is right to
    call. What is fused is fp8 with a scale a row (`kFp8DynamicTokenSym`, bounded by the layer's `input_scale_ub` if it
    has one), with the layer's `input_scale` (`kFp8StaticTensorSym`), or with a scale for each 128 neighbours
    (`kFp8Dynamic128Sym`); MXFP8 (`kMxfp8Dynamic`) for FlashInfer's linears; and NVFP4 (`kNvfp4Dynamic`) under the
    layer's `input_global_scale_inv`; for vLLM's RMSNorm and LayerNorm. Scales of MXFP8 and NVFP4 lie in cuBLAS's tiles
    of 128 rows by 4 groups, as those linears read them. Scales of 128 neighbours lie as the quantisation of the layer's
    kernel has them, its `quant_fp8`: by rows, by columns, by columns that start at multiples of 16 bytes, as powers of
    two, or as those packed for DeepGEMM; and by rows, as vLLM's activations return them, where it has none.

    Args:
        norm: a vLLM RMSNorm or LayerNorm.
        x: (..., hidden_size).
        linear: the layer that gets the result alone.
        residual: added to x first, for RMSNorm; of x's shape and dtype.

    Returns:
        What norm(x) or norm(x, residual) returns, with a `QuantizedActivation` in the place of the normalised rows
        if they are quantised. Its scale is x's shape with one in the place of hidden_size, or the number of groups; of
        two dimensions by columns and in NVFP4's tiles, of one in MXFP8's, as bytes; or the layer's own `input_scale`.
    """
    found = _quantised(norm, x, linear, residual)
    if found is not None:
        return found
    return norm(x) if residual is None else norm(x, residual)


def _quantised(norm: Any, x: Tensor, linear: Any, residual: Tensor | None) -> Any:
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation, get_input_quant_key

    key = get_input_quant_key(linear)
    form = _form(key)
    if form is None:
        return None
    # A model may call this where VLLM_PLUGINS has the plug not registered.
    follow_switch(SWITCH)
    normalise = _normalises(norm, x, residual)
    if normalise is None or (asked := form.asks(linear, x)) is None:
        return None
    function, vectors, options = normalise
    options |= {"out_dtype": key.dtype} | asked
    # Scales by columns are those of the rows of a matrix.
    flat = options.get("scale_layout") == "column_major" and x.dim() != 2
    rows = x.reshape(-1, x.shape[-1]) if flat else x
    if residual is not None:
        options["residual"] = residual.reshape(rows.shape)
    if x.element_size() != 2 or key.dtype is torch.float8_e4m3fnuz:
        # fp32 is not rounded, and the fp8 of ROCm's older GPUs is quantised as it is in fp32.
        options |= {"cast": "after_weight", "quantise_rounded": False}
    out = served(_WHOSE, function, rows, *vectors, **options)
    if out is None:
        return None
    # Two of NVFP4 are a byte.
    data = out.y.view(key.dtype).view(*x.shape[:-1], -1)
    made = QuantizedActivation(data, form.scale(out.y_scale, linear), x.dtype, x.shape, key)
    if out.residual_out is None:
        return made
    return made, out.residual_out.view(x.shape)


def _normalises(norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Quantises, Vectors, Options] | None:
    """The function that a norm is, its vectors and its options; None for what no kernel serves."""
    from vllm.model_executor.layers import layernorm as layers

    if isinstance(norm, layers.RMSNorm):
        weight = norm.weight.data if norm.has_weight else None
        if norm.variance_size_override is not None or not fits(x, weight, residual=residual):
            return None
        options = {"eps": norm.variance_epsilon, "cast": cast_of(weight), "quantise_rounded": True}
        return quantised_rms_norm, (weight,), options
    # Releases before 0.33 have no LayerNorm.
    kind: type[Any] | tuple[()] = getattr(layers, "LayerNorm", ())
    if not isinstance(norm, kind) or residual is not None or not fits(x, norm.weight, norm.bias):
        return None
    vectors = tuple([None if vector is None else vector.data for vector in (norm.weight, norm.bias)])
    return quantised_layer_norm, vectors, {"eps": norm.eps, "quantise_rounded": True}


# What a linear layer asks for


class _Form(NamedTuple):
    """How rows of a key are made: what a layer asks of a quantised norm, None for what is not served; and its scale."""

    asks: Callable[[Any, Tensor], Options | None]
    scale: Callable[[Any, Any], Any]


def _form(key: Any) -> _Form | None:
    """Return the form of a key; None for a key that is not served."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    if key is None:
        return None
    # Not all releases have all.
    return next((form for name, form in _SERVED.items() if key == getattr(quant_utils, name, None)), None)


def _by_rows(linear: Any, x: Tensor) -> Options | None:
    bound = getattr(linear, "input_scale_ub", None)
    if bound is None:
        return {"fquant": "dynamic"}
    return {"fquant": "dynamic", "scale_ub": bound.data} if _is_one(bound, x) else None


def _static(linear: Any, x: Tensor) -> Options | None:
    scale: Any = getattr(linear, "input_scale", None)
    return {"fquant": "static", "y_scale": scale.data} if _is_one(scale, x) else None


def _is_one(scale: Any, x: Tensor) -> bool:
    """Return True if `scale` is a tensor of one fp32 value on x's device."""
    if not isinstance(scale, Tensor):
        return False
    return scale.dtype is torch.float32 and scale.numel() == 1 and scale.device == x.device


def _by_groups(linear: Any, x: Tensor) -> Options | None:
    asked: Options = {"fquant": "dynamic", "group_size": _GROUP}
    quantiser = _quantiser(linear)
    if quantiser is None:
        return asked
    # AITER's layouts are its own.
    if tuple(quantiser.group_shape) != (1, _GROUP) or quantiser.static or getattr(quantiser, "use_aiter", False):
        return None
    if quantiser.num_token_padding is not None:
        return None
    if quantiser.use_ue8m0:
        asked["scale_format"] = "ue8m0_packed" if _packs(quantiser) else "ue8m0_float"
    if quantiser.column_major_scales or asked.get("scale_format") == "ue8m0_packed":
        asked["scale_layout"] = "column_major"
        if not (quantiser.tma_aligned_scales or asked.get("scale_format") == "ue8m0_packed"):
            columns, m = -(-x.shape[-1] // _GROUP), x.numel() // x.shape[-1]
            # Columns side by side, without the gaps that TMA asks for.
            asked["y_scale"] = x.new_empty((columns, m), dtype=torch.float32).t()
    return asked


_GROUP = 128


def _quantiser(linear: Any) -> Any:
    """The `QuantFP8` of the kernel behind a layer, which quantises rows that come in 16 bits; None without one."""
    kernels = (getattr(getattr(linear, name, None), "fp8_linear", None) for name in ("scheme", "quant_method"))
    return next((found for kernel in kernels if (found := getattr(kernel, "quant_fp8", None)) is not None), None)


def _packs(quantiser: Any) -> bool:
    """Return True if a quantiser returns powers of two as their exponents, four per int32."""
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

    oracle: Any = DeepGemmQuantScaleFMT
    return bool(quantiser.use_deep_gemm_supported) and oracle.from_oracle() == oracle.UE8M0


# Those that read MXFP8's scales in tiles: its key does not say how they lie.
_OF_TILES = ("FlashInferCutlassMxfp8LinearKernel", "FlashInferCutedslMxfp8LinearKernel")


def _mxfp8(linear: Any, x: Tensor) -> Options | None:
    kernel: Any = getattr(getattr(linear, "quant_method", None), "kernel", None)
    if type(kernel).__name__ not in _OF_TILES or x.shape[-1] % 32:
        return None
    return {"fquant": "dynamic", "group_size": 32, "scale_format": "ue8m0", "scale_layout": "swizzled_128x4"}


def _nvfp4(linear: Any, x: Tensor) -> Options | None:
    scale: Any = getattr(linear, "input_global_scale_inv", None)
    if not _is_one(scale, x) or x.shape[-1] % 16:
        return None
    asked: Options = {"fquant": "dynamic", "group_size": 16, "scale_format": "e4m3", "scale_layout": "swizzled_128x4"}
    return asked | {"global_scale": scale.data, "out_dtype": torch.float4_e2m1fn_x2}


# By the names of vLLM's keys.
_SERVED: Mapping[str, _Form] = {
    "kFp8DynamicTokenSym": _Form(_by_rows, lambda scale, linear: scale.unsqueeze(-1)),
    "kFp8StaticTensorSym": _Form(_static, lambda scale, linear: linear.input_scale),
    "kFp8Dynamic128Sym": _Form(_by_groups, lambda scale, linear: scale),
    "kMxfp8Dynamic": _Form(_mxfp8, lambda scale, linear: scale.view(torch.uint8).view(-1)),
    "kNvfp4Dynamic": _Form(_nvfp4, lambda scale, linear: scale),
}

"""vLLM: providers of its IR's RMSNorms, classes of other norms, norms that quantise, and norms behind an all-reduce.

Through the entry point `vllm.general_plugins` every process of vLLM calls `register`. vLLM reads annotations when it
registers providers, so that this module has no annotations as strings.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.backend import backend
from ..families.public import quantised_layer_norm, quantised_rms_norm
from ..settings import lists_us
from ..upstream.imports import when_imported
from .serving import cast_of, fits, follow_switch, layer, reduced, rms, served

# A child of vLLM's, whose handlers show it.
logger = logging.getLogger("vllm.normforge")

# Our name in --kernel-config and --ir-op-priority.
PROVIDER = "normforge"
# vLLM's own switch of batch invariance.
SWITCH = "VLLM_BATCH_INVARIANT"
# vLLM's own list of the plugins that are to run; without one, all run.
VARIABLE = "VLLM_PLUGINS"

_LAYERS = "vllm.model_executor.layers.layernorm"


def register() -> None:
    """Register providers, which serve once a priority names them, and classes, if VLLM_PLUGINS names normforge.

    Norms of vLLM's IR have providers; the others are classes, all of them in a release without the IR. A second call
    registers nothing twice. Under VLLM_BATCH_INVARIANT all kernels of the process are batch invariant from here on.
    """
    if follow_switch(SWITCH):
        logger.info("normforge's kernels are batch invariant: %s is on", SWITCH)
    if offered := _offer():
        logger.info("normforge offers providers of vLLM IR's %s; a priority chooses them", " and ".join(offered))
    else:
        logger.info("normforge offers no providers: this vLLM has no IR of RMSNorm")
    names = ["LayerNorm"] if offered else list(_CLASSES)
    if lists_us(VARIABLE):
        when_imported(_LAYERS, partial(_swap, names))
    else:
        logger.info("normforge leaves vLLM's %s alone: %s does not name it", ", ".join(names), VARIABLE)


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
        if (op := getattr(ops, provide.__name__, None)) is None:
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


# Classes


def _swap(names: list[str]) -> None:
    """Register classes of ours in place of vLLM's norms of these names."""
    from vllm.model_executor import custom_op

    for name in names:
        theirs: Any = getattr(sys.modules[_LAYERS], name, None)
        if custom_op.CustomOp not in getattr(theirs, "__mro__", ()):
            logger.info("normforge serves no %s: this vLLM's is none of its custom operators", name)
        elif (other := custom_op.op_registry_oot.get(name)) is None:
            ours: Any = type(f"Normforge{name}", (theirs,), _members(theirs, _CLASSES[name]))
            custom_op.CustomOp.register_oot(name=name)(ours)
            # The word that switches it in --compilation-config; registering made it the class's.
            ours.name = getattr(theirs, "name", name)
            logger.info("normforge serves vLLM's %s", name)
        elif other.__module__ != __name__:
            logger.warning("normforge serves no %s: %s.%s does", name, other.__module__, other.__name__)


def _members(theirs: Any, compute: Callable[..., Any]) -> dict[str, Any]:
    """Return the members of a class whose norms run on kernels, or else by vLLM's own forward.

    TorchDynamo follows a function here, and no `functools.partialmethod`.
    """

    def forward_cuda(norm: Any, x: Tensor, *residual: Tensor | None) -> Any:
        out = compute(norm, x, *residual)
        return theirs.forward_cuda(norm, x, *residual) if out is None else out

    return {"__module__": __name__, "forward_cuda": forward_cuda}


def _rms_norm(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if norm.variance_size_override is not None:
        return None
    weight = norm.weight.data if norm.has_weight else None
    return rms("vLLM", x, weight, residual, eps=norm.variance_epsilon, cast=cast_of(weight))


_CLASSES: Mapping[str, Callable[..., Any]] = {
    "LayerNorm": lambda norm, x: layer("vLLM", x, norm.weight, norm.bias, eps=norm.eps),
    "RMSNorm": _rms_norm,
    "GemmaRMSNorm": lambda norm, x, residual=None: rms(
        "vLLM", x, norm.weight.data, residual, eps=norm.variance_epsilon, weight_offset=1.0
    ),
}


# Norms that quantise for the linear layer behind them, with the results of vLLM's separate operators. Between norm and
# quantisation vLLM holds rows in 16 bits, in memory or in registers of its fused kernels. vLLM rounds rows before the
# weight and again before the quantisation, and so do these kernels.

_WHOSE = "normforge leaves a norm and its quantisation to vLLM"

Options = dict[str, Any]
Vectors = tuple[Tensor | None, ...]
Quantises = Callable[..., Any]


def maybe_fused_norm_quant(norm: Any, x: Tensor, linear: Any, residual: Tensor | None = None) -> Any:
    """Compute a norm, and quantise for the linear layer behind it in the same kernel if that takes quantised rows.

    Models written for vLLM may call this for any linear layer, as they call vLLM's own `maybe_fused_act_quant`. For
    vLLM's RMSNorm and LayerNorm these quantisations are fused:

    - fp8 with a scale per row (`kFp8DynamicTokenSym`), bounded by the layer's `input_scale_ub` if it has one;
    - fp8 with the layer's `input_scale` (`kFp8StaticTensorSym`);
    - fp8 with a scale per group of 128 elements (`kFp8Dynamic128Sym`);
    - MXFP8 (`kMxfp8Dynamic`) for FlashInfer's linears;
    - NVFP4 (`kNvfp4Dynamic`) with the layer's `input_global_scale_inv`.

    Scales of MXFP8 and NVFP4 are in cuBLAS's tiles of 128 rows by 4 groups, as those linears read them. Scales of 128
    elements have the layout of the layer's `quant_fp8`: by rows, by columns, by columns that start at multiples of 16
    bytes, as powers of two, or as powers of two packed for DeepGEMM. Without a `quant_fp8` they are by rows, as vLLM's
    activations return them.

    Args:
        norm: a vLLM RMSNorm or LayerNorm.
        x: (..., hidden_size).
        linear: the only layer that reads the result.
        residual: added to x first, for RMSNorm; of x's shape and dtype.

    Returns:
        The result of norm(x) or norm(x, residual), with a `QuantizedActivation` in place of the normalised rows if they
        are quantised. The shape of its scale is x's, with 1 or the number of groups in place of hidden_size. A scale by
        columns or in NVFP4's tiles has two dimensions, a scale in MXFP8's tiles has one, of bytes. For static
        quantisation the scale is the layer's own `input_scale`.
    """
    result = _quantised(norm, x, linear, residual)
    if result is not None:
        return result
    return norm(x) if residual is None else norm(x, residual)


def maybe_fused_all_reduce_norm(norm: Any, x: Tensor, residual: Tensor | None = None, linear: Any = None) -> Any:
    """Add up partial sums over the tensor-parallel ranks, and compute a norm of them, in one kernel where there is one.

    Models written for vLLM call it behind a layer that leaves its all-reduce out (`RowParallelLinear` with
    `reduce_results=False`), on all ranks. In graphs that vLLM compiles, and for more than 16 MiB of x, vLLM's
    all-reduce runs, and the norm behind it.

    Args:
        norm: a vLLM RMSNorm or LayerNorm.
        x: this rank's partial sum, (..., hidden_size).
        residual: added to the sum over ranks, of x's shape and dtype.
        linear: the only layer that reads the result, which is quantised for it; see `maybe_fused_norm_quant`.

    Returns:
        What `maybe_fused_norm_quant` returns for the sum over ranks; for LayerNorm too a pair, if there is a residual.

    Raises:
        PeerError: another rank was late.
    """
    from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

    if (group := get_tp_group()).world_size > 1:
        reduce = partial(_reduce, norm, group.device_group)
        result = _quantised(norm, x, linear, residual, reduce)
        result = _reduced(norm, x, residual, reduce) if result is None else result
        if result is not None:
            return result
    total = tensor_model_parallel_all_reduce(x)
    if residual is not None and not hasattr(norm, "variance_epsilon"):
        # vLLM's LayerNorm adds nothing.
        total += residual
        return maybe_fused_norm_quant(norm, total, linear), total
    return maybe_fused_norm_quant(norm, total, linear, residual)


def _reduce(norm: Any, group: Any, _: str, __: Quantises, x: Tensor, *vectors: Any, **options: Any) -> Any:
    """Compute what `served` does, of the sum of x over the ranks of a group."""
    word = "rms" if hasattr(norm, "variance_epsilon") else "layer"
    return reduced("vLLM", group, x, options.pop("residual", None), *vectors, norm=word, **options)


def _reduced(norm: Any, x: Tensor, residual: Tensor | None, reduce: Any) -> Any:
    follow_switch(SWITCH)
    normalise = _normalises(norm, x, residual, sums=True)
    if normalise is None:
        return None
    function, vectors, options = normalise
    del options["quantise_rounded"]
    out = reduce(_WHOSE, function, x, *vectors, residual=residual, **options)
    return None if out is None else out.y if residual is None else out[:2]


def _quantised(norm: Any, x: Tensor, linear: Any, residual: Tensor | None, run: Any = served) -> Any:
    """Return a norm's rows as a layer takes them quantised, by a call that `run` makes; None if no kernel serves it."""
    key = None if linear is None else _key_of(linear)
    if key is None or (form := _form(key)) is None:
        return None
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

    # A model may call this function although VLLM_PLUGINS excludes the plug.
    follow_switch(SWITCH)
    normalise = _normalises(norm, x, residual, sums=run is not served)
    if normalise is None or (asked := form.asks(linear, x)) is None:
        return None
    function, vectors, options = normalise
    options |= {"out_dtype": key.dtype} | asked
    # Only a matrix has scales by columns.
    flat = options.get("scale_layout") == "column_major" and x.dim() != 2
    rows = x.reshape(-1, x.shape[-1]) if flat else x
    if residual is not None:
        options["residual"] = residual.reshape(rows.shape)
    if x.element_size() != 2 or key.dtype is torch.float8_e4m3fnuz:
        # vLLM does not round fp32, and quantises to the fp8 of ROCm's older GPUs from fp32.
        options |= {"cast": "after_weight", "quantise_rounded": False}
    out = run(_WHOSE, function, rows, *vectors, **options)
    if out is None:
        return None
    # A byte holds two elements of NVFP4.
    data = out.y.view(key.dtype).view(*x.shape[:-1], -1)
    activation = QuantizedActivation(data, form.scale(out.y_scale, linear), x.dtype, x.shape, key)
    if out.residual_out is None:
        return activation
    return activation, out.residual_out.view(x.shape)


def _normalises(
    norm: Any, x: Tensor, residual: Tensor | None, *, sums: bool
) -> tuple[Quantises, Vectors, Options] | None:
    """Return the function that computes a norm, its vectors and its options; None if no kernel serves the norm.

    vLLM's LayerNorm takes no residual, unless the norm is one of sums over ranks.
    """
    from vllm.model_executor.layers import layernorm as layers

    if isinstance(norm, layers.RMSNorm):
        weight = norm.weight.data if norm.has_weight else None
        if norm.variance_size_override is not None or not fits(x, weight, residual=residual):
            return None
        options = {"eps": norm.variance_epsilon, "cast": cast_of(weight), "quantise_rounded": True}
        return quantised_rms_norm, (weight,), options
    # Releases before 0.33 have no LayerNorm.
    kind: type[Any] | tuple[()] = getattr(layers, "LayerNorm", ())
    adds = residual is not None and not sums
    if not isinstance(norm, kind) or adds or not fits(x, norm.weight, norm.bias, residual):
        return None
    vectors = tuple([None if vector is None else vector.data for vector in (norm.weight, norm.bias)])
    return quantised_layer_norm, vectors, {"eps": norm.eps, "quantise_rounded": True}


# Requests of a linear layer


class _Form(NamedTuple):
    """A form of quantised rows: the options that a layer asks for, or None if not served; and the scale it reads."""

    asks: Callable[[Any, Tensor], Options | None]
    scale: Callable[[Any, Any], Any]


def _key_of(linear: Any) -> Any:
    """Return the key of the quantised rows that a layer takes, or None."""
    try:
        from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
    except ImportError:
        # Releases before 0.33 keep it as an attribute, and those before 0.24 have no such layer.
        return getattr(linear, "input_quant_key", None)
    return get_input_quant_key(linear)


def _form(key: Any) -> _Form | None:
    """Return the form of a key; None for a key that is not served."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    # Some releases lack some of the keys.
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
            # Contiguous columns, without the gaps that TMA requires.
            asked["y_scale"] = x.new_empty((columns, m), dtype=torch.float32).t()
    return asked


_GROUP = 128


def _quantiser(linear: Any) -> Any:
    """Return the `QuantFP8` of a layer's kernel, which quantises rows of 16 bits, or None if the kernel has none."""
    for name in ("scheme", "quant_method"):
        kernel = getattr(getattr(linear, name, None), "fp8_linear", None)
        if (quantiser := getattr(kernel, "quant_fp8", None)) is not None:
            return quantiser
    return None


def _packs(quantiser: Any) -> bool:
    """Return True if a quantiser returns powers of two as their exponents, four per int32."""
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT as Format

    return bool(quantiser.use_deep_gemm_supported) and Format.from_oracle() == Format.UE8M0


# Kernels that read MXFP8's scales in tiles; the key does not state the layout.
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

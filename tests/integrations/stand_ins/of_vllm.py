"""The IR of vLLM, its custom operators, its norms, and the contract of quantised activations.

After vllm/ir/op.py, vllm/ir/ops/layernorm.py, vllm/model_executor/custom_op.py, layers/layernorm.py,
layers/fusion/quant_activation.py and layers/quantization/input_quant_fp8.py of vllm-project/vllm's release 0.33.0 (the
first two were at
fafeb7c0044d2ac93dc6741b188ff64317399e66 and e8757cc8804e8a2555a574a0efc6443ab509b191 before).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.library import infer_schema
from torch.nn import functional

from . import Group, all_reduced, install

LAYERS = "vllm.model_executor.layers.layernorm"
CUSTOM = "vllm.model_executor.custom_op"
FUSION = "vllm.model_executor.layers.fusion.quant_activation"
QUANT = "vllm.model_executor.layers.quantization.utils.quant_utils"
QUANTISER = "vllm.model_executor.layers.quantization.input_quant_fp8"
DEEP_GEMM = "vllm.utils.deep_gemm"
MXFP8 = "vllm.model_executor.layers.quantization.utils.mxfp8_utils"
NVFP4 = "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"


class Impl(NamedTuple):
    """A provider's implementation."""

    provider: str
    impl_fn: Callable[..., Any]
    supported: bool
    supports_args: Callable[..., bool] | None


class Op:
    """An operator with providers, called in the order of a priority; checked as vLLM checks them."""

    def __init__(self, native: Callable[..., Any], allow_inplace: bool) -> None:
        self.native, self.allow_inplace = native, allow_inplace
        self.schema = infer_schema(native, mutates_args=[])
        self.impls = {"native": Impl("native", native, True, None)}
        self.priority: list[Impl] = []

    def register_impl(
        self,
        provider: str,
        *,
        supported: bool = True,
        supports_args: Callable[..., bool] | None = None,
        inplace: bool = False,
    ) -> Callable[[Callable[..., Any]], Impl]:
        assert provider not in ("native", "unfused")

        def register(function: Callable[..., Any]) -> Impl:
            assert provider not in self.impls
            if infer_schema(function, mutates_args=[]) != self.schema:
                raise ValueError(f"{provider} does not match the native schema {self.schema}")
            if supports_args is not None:
                own, given = (inspect.signature(each).parameters.values() for each in (self.native, supports_args))
                if [(each.name, each.default) for each in own] != [(each.name, each.default) for each in given]:
                    raise ValueError(f"supports_args of {provider} has other parameters")
                assert all(each.kind is not each.KEYWORD_ONLY for each in given)
            assert self.allow_inplace or not inplace
            self.impls[provider] = Impl(provider, function, supported, supports_args)
            return self.impls[provider]

        return register

    @contextlib.contextmanager
    def set_priority(self, providers: list[str]) -> Iterator[None]:
        before, self.priority = self.priority, [self.impls[each] for each in providers if self.impls[each].supported]
        yield
        self.priority = before

    def __call__(self, *arguments: Any) -> Any:
        chosen = next(each for each in self.priority if each.supports_args is None or each.supports_args(*arguments))
        return chosen.impl_fn(*arguments)


def _rows(rows: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None, dtype: torch.dtype) -> Tensor:
    of = rows if variance_size is None else rows[..., :variance_size]
    y = rows * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(dtype)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """The native form."""
    return _rows(x.float(), weight, epsilon, variance_size, x.dtype)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The native form."""
    rows = x.float() + x_residual.float()
    return _rows(rows, weight, epsilon, variance_size, x.dtype), rows.to(x.dtype)


@dataclass
class QuantizedActivation:
    """A quantised activation with its scale."""

    data: Tensor
    scale: Tensor
    orig_dtype: torch.dtype
    orig_shape: torch.Size
    quant_key: Any


class QuantKey(NamedTuple):
    """How values and scales are to be read."""

    dtype: torch.dtype
    scale: str


KEYS = {
    "kFp8DynamicTokenSym": QuantKey(torch.float8_e4m3fn, "per token"),
    "kFp8StaticTensorSym": QuantKey(torch.float8_e4m3fn, "static"),
    "kFp8Dynamic128Sym": QuantKey(torch.float8_e4m3fn, "groups of 128"),
    "kNvfp4Dynamic": QuantKey(torch.uint8, "groups of 16"),
    "kMxfp8Dynamic": QuantKey(torch.float8_e4m3fn, "groups of 32"),
    "kMxfp4Dynamic": QuantKey(torch.uint8, "groups of 32"),
}


class GroupShape(NamedTuple):
    """Rows and columns that share a scale, -1 for all."""

    row: int
    col: int


PER_TENSOR, PER_TOKEN = GroupShape(-1, -1), GroupShape(1, -1)
PER_GROUP = GroupShape(1, 128)
QMAX = 448.0
LEAST = 1.0 / (QMAX * 512.0)


class QuantFP8:
    """Quantises matrices, in the form that is made of torch's operators."""

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape,
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool = False,
    ) -> None:
        self.static, self.group_shape, self.num_token_padding = static, group_shape, num_token_padding
        self.column_major_scales, self.tma_aligned_scales = column_major_scales, tma_aligned_scales
        self.use_ue8m0, self.use_deep_gemm_supported, self.use_aiter = use_ue8m0, False, False

    def forward_native(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.group_shape.col > 0:
            return self._by_groups(x)
        if scale is None:
            amax = x.abs().amax(-1, keepdim=True).float()
            scale = ((amax if scale_ub is None else amax.clamp(max=scale_ub)) / QMAX).clamp(min=LEAST)
        return (x.float() * scale.reciprocal()).clamp(-QMAX, QMAX).to(torch.float8_e4m3fn), scale

    def _by_groups(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = self.group_shape.col
        padded = functional.pad(x, (0, -x.shape[-1] % size)).view(x.shape[0], -1, size).float()
        scale = (padded.abs().amax(-1, keepdim=True) / QMAX).clamp(min=LEAST)
        if self.use_ue8m0:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        q = (padded / scale).clamp(-QMAX, QMAX).to(torch.float8_e4m3fn).view(x.shape[0], -1)
        scale = scale.squeeze(-1)
        return q[:, : x.shape[-1]], scale.t().contiguous().t() if self.column_major_scales else scale


def mxfp8(x: Tensor, is_sf_swizzled_layout: bool) -> tuple[Tensor, Tensor]:
    """Rows in MXFP8, and their scales in tiles of 128 rows by 4 groups."""
    assert is_sf_swizzled_layout
    groups = x.float().view(x.shape[0], -1, 32)
    exponent = (groups.abs().amax(-1) / QMAX).log2().ceil()
    data = (groups * torch.exp2(-exponent).unsqueeze(-1)).to(torch.float8_e4m3fn)
    scale = functional.pad((exponent + 127).to(torch.uint8), (0, -groups.shape[1] % 4, 0, -x.shape[0] % 128))
    tiles = scale.view(-1, 4, 32, scale.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return data.view(x.shape), tiles.flatten()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4(x: Tensor, global_scale: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Rows in NVFP4, both as fp32: ties go to the value whose last bit is 0."""
    groups = x.float().view(x.shape[0], -1, block_size)
    scale = (global_scale * (groups.abs().amax(-1) / 6)).clamp(max=QMAX).to(torch.float8_e4m3fn).float()
    scaled = (groups * (global_scale / scale).unsqueeze(-1)).clamp(-6, 6).view(x.shape)
    apart = (scaled.abs().unsqueeze(-1) - E2M1).abs()
    # Of two that are as near the one at an even place.
    apart += torch.tensor([0.0, 1e-6]).repeat(4)
    return E2M1[apart.argmin(-1)] * scaled.sign(), scale


class DeepGemmQuantScaleFMT(Enum):
    """How DeepGEMM wants scales of this machine's kind."""

    FLOAT32 = 0
    FLOAT32_CEIL_UE8M0 = 1
    UE8M0 = 2

    @classmethod
    def from_oracle(cls) -> "DeepGemmQuantScaleFMT":
        return cls.FLOAT32


def _input_quant_key(layer: torch.nn.Module) -> Any:
    return None if getattr(layer, "requires_unquantized_input", False) else getattr(layer, "_input_quant_key", None)


def _norms() -> tuple[dict[str, Any], dict[str, type]]:
    """The classes of norms, and the registry of classes that are made in their place."""
    swapped: dict[str, type] = {}

    class CustomOp(torch.nn.Module):
        name: str
        forward_cuda: Any

        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            return super().__new__(swapped.get(cls.__name__, cls))

        def forward(self, *arguments: Any, **named: Any) -> Any:
            return self.forward_cuda(*arguments, **named)

        @classmethod
        def register_oot(cls, *, name: str) -> Any:
            def register(op_cls: Any) -> Any:
                assert name not in swapped
                op_cls.name = name
                swapped[name] = op_cls
                return op_cls

            return register

    class RMSNorm(CustomOp):
        name = "rms_norm"

        def __init__(
            self,
            hidden_size: int,
            eps: float = 1e-6,
            var_hidden_size: int | None = None,
            has_weight: bool = True,
            dtype: torch.dtype | None = None,
        ) -> None:
            super().__init__()
            self.hidden_size, self.variance_epsilon, self.has_weight = hidden_size, eps, has_weight
            self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
            self.weight: Any = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

        def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
            options = (self.weight.data if self.has_weight else None, self.variance_epsilon)
            override = self.variance_size_override
            return rms_norm(x, *options, override) if residual is None else fused_add_rms_norm(x, residual, *options)

    class GemmaRMSNorm(RMSNorm):
        name = "gemma_rms_norm"

        def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
            options = (1.0 + self.weight.data.float(), self.variance_epsilon)
            return rms_norm(x, *options) if residual is None else fused_add_rms_norm(x, residual, *options)

    class LayerNorm(CustomOp):
        name = "layer_norm"

        def __init__(
            self,
            hidden_size: int,
            eps: float = 1e-5,
            elementwise_affine: bool = True,
            bias: bool = True,
            dtype: torch.dtype | None = None,
        ) -> None:
            super().__init__()
            self.normalized_shape, self.eps = (hidden_size,), eps
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype)) if elementwise_affine else None
            has_bias = elementwise_affine and bias
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype)) if has_bias else None

        def forward_cuda(self, x: Tensor) -> Tensor:
            wide = x.dtype if self.weight is None else torch.promote_types(x.dtype, self.weight.dtype)
            return functional.layer_norm(x.to(wide), self.normalized_shape, self.weight, self.bias, self.eps).type_as(x)

    return {each.__name__: each for each in (CustomOp, RMSNorm, GemmaRMSNorm, LayerNorm)}, swapped


class Platform:
    """A CPU's."""

    @staticmethod
    def is_cuda_alike() -> bool:
        return False


def stand_in(monkeypatch: pytest.MonkeyPatch, *, bare: bool = False) -> None:
    """Have these be vLLM; a bare one has no operator in its IR, and keys of linear layers are attributes."""
    norms, swapped = _norms()
    ops = {} if bare else {"rms_norm": Op(rms_norm, False), "fused_add_rms_norm": Op(fused_add_rms_norm, True)}
    fusion = {} if bare else {"get_input_quant_key": _input_quant_key}
    install(
        monkeypatch,
        {
            "vllm.ir.ops": dict(ops),
            "vllm.platforms": {"current_platform": Platform},
            "vllm.distributed": {"get_tp_group": Group, "tensor_model_parallel_all_reduce": all_reduced},
            CUSTOM: {"CustomOp": norms["CustomOp"], "op_registry_oot": swapped},
            LAYERS: norms,
            FUSION: {"QuantizedActivation": QuantizedActivation} | fusion,
            QUANT: KEYS | {"GroupShape": GroupShape},
            QUANTISER: {"QuantFP8": QuantFP8},
            MXFP8: {"_mxfp8_e4m3_quantize_torch": mxfp8},
            NVFP4: {"ref_nvfp4_quant": nvfp4},
            DEEP_GEMM: {"DeepGemmQuantScaleFMT": DeepGemmQuantScaleFMT},
        },
    )

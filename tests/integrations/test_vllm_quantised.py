"""Norms that quantise for vLLM's linear layers, beside vLLM's norm and its quantisation one after the other.

Beside a stand-in of both and, where it is installed, vLLM's own, in the form that is made of torch's operators: its
kernels are CUDA's.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from normforge.integrations import serving
from normforge.integrations import vllm as plug
from normforge.reference.quantised import unpacked, unswizzled

from ..calling import there
from ..nn.models import randomised
from . import engines
from .stand_ins import of_vllm

# Two groups of 128 and a short one.
N = 320
rows = partial(engines.rows, n=N)


def key(name: str) -> Any:
    return getattr(sys.modules[of_vllm.QUANT], name)


def linear(name: str | None, kernel: Any = None, **attributes: Any) -> Any:
    """A linear layer that takes activations quantised so, by a kernel whose own quantisation is given."""
    layer: Any = torch.nn.Linear(N, N)
    if name is not None:
        # As releases from 0.33 on and before have it.
        layer._input_quant_key = layer.input_quant_key = key(name)
    for attribute, value in attributes.items():
        setattr(layer, attribute, torch.nn.Parameter(value, requires_grad=False))
    if kernel is not None:
        layer.scheme = SimpleNamespace(fp8_linear=SimpleNamespace(quant_fp8=kernel))
    return layer


def quantiser(shape: tuple[int, int], *, static: bool = False, **options: Any) -> Any:
    """The quantisation of matrices that vLLM has."""
    module = importlib.import_module(of_vllm.QUANTISER)
    options.setdefault("use_ue8m0", False)
    return module.QuantFP8(static, sys.modules[of_vllm.QUANT].GroupShape(*shape), **options)


def normalised(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the providers of vLLM's IR and our LayerNorm compute, to the bit what kernels quantise."""
    if residual is not None:
        return plug.fused_add_rms_norm(x, residual, norm.weight.data, norm.variance_epsilon)
    if hasattr(norm, "variance_epsilon"):
        return plug.rms_norm(x, norm.weight.data, norm.variance_epsilon), None
    return there(serving.layer("vLLM", x, norm.weight.data, norm.bias.data, eps=norm.eps)), None


def fused(norm: Any, x: torch.Tensor, layer: Any, residual: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    found = plug.maybe_fused_norm_quant(norm, x, layer, residual)
    return (found, None) if residual is None else found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


class Case(NamedTuple):
    """A key, vLLM's own quantisation for it, what that and the layer have besides, and strides of scales of 6 rows."""

    key: str
    shape: tuple[int, int]
    layer: dict[str, torch.Tensor]
    options: dict[str, Any]
    strides: tuple[int, ...] = ()

    def quantised(self, own: Any, y: torch.Tensor) -> Any:
        """Return what vLLM's own quantisation makes of rows, and their scales."""
        layer = {name: value.to(y.device) for name, value in self.layer.items()}
        bound = [layer["input_scale_ub"]] if "input_scale_ub" in layer else []
        return own.forward_native(y.view(-1, N), layer.get("input_scale"), *bound)


GROUPS, COLUMNS = ("kFp8Dynamic128Sym", of_vllm.PER_GROUP), {"column_major_scales": True}
CASES = {
    "row": Case("kFp8DynamicTokenSym", of_vllm.PER_TOKEN, {}, {}),
    "bounded": Case("kFp8DynamicTokenSym", of_vllm.PER_TOKEN, {"input_scale_ub": torch.tensor(1.5)}, {}),
    "static": Case("kFp8StaticTensorSym", of_vllm.PER_TENSOR, {"input_scale": torch.tensor(0.013)}, {"static": True}),
    "groups": Case(*GROUPS, {}, {}, (3, 1)),
    "columns": Case(*GROUPS, {}, COLUMNS, (1, 6)),
    "aligned": Case(*GROUPS, {}, COLUMNS | {"tma_aligned_scales": True}, (1, 8)),
    "powers": Case(*GROUPS, {}, COLUMNS | {"use_ue8m0": True}, (1, 6)),
    "powers by rows": Case(*GROUPS, {}, {"use_ue8m0": True}, (3, 1)),
}


@pytest.mark.parametrize("layers", ["bare"], indirect=True)
def test_a_key_may_be_an_attribute(layers: Any, ran: list[str]) -> None:
    norm, x = layers.RMSNorm(N, dtype=torch.bfloat16), rows()
    made, _ = fused(norm, x, linear("kFp8DynamicTokenSym"), None)
    assert made.quant_key == key("kFp8DynamicTokenSym")
    assert isinstance(fused(norm, x, linear(None), None)[0], torch.Tensor)
    assert ran == ["quantised_rms_norm", "rmsnorm2d_fwd"]


@pytest.mark.parametrize(
    ("kind", "m", "dtype"),
    [
        ("rms", (2, 3), torch.bfloat16),
        ("rms", (2, 3), torch.float32),
        ("adds", (6,), torch.bfloat16),
        ("layer", (2, 3), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_norm_quantises_as_vllm_does_after_it(
    layers: Any, ran: list[str], case: Case, kind: str, m: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual = rows(dtype, m), rows(dtype, m) if kind == "adds" else None
    norm = randomised(layers.LayerNorm(N) if kind == "layer" else layers.RMSNorm(N, dtype=dtype))
    own = quantiser(case.shape, **case.options)
    layer = linear(case.key, own, **case.layer)
    y, due = normalised(norm, x, residual)
    ran.clear()

    found, summed = fused(norm, x, layer, residual)

    assert ran == ["quantised_layer_norm" if kind == "layer" else "quantised_rms_norm"]
    torch.testing.assert_close(summed, due, rtol=0, atol=0)
    data, scale = case.quantised(own, y)
    assert (found.data.dtype, found.data.shape, found.data.is_contiguous()) == (torch.float8_e4m3fn, x.shape, True)
    assert (found.orig_dtype, found.orig_shape, found.quant_key) == (x.dtype, x.shape, key(case.key))
    torch.testing.assert_close(found.scale.reshape(scale.shape), scale, rtol=0, atol=0)
    assert "input_scale" not in case.layer or found.scale is layer.input_scale
    if case.strides:
        shape = (6, 3) if case.options.get("column_major_scales") else (*m, 3)
        assert (found.scale.shape, found.scale.dtype, found.scale.stride()[-2:]) == (shape, scale.dtype, case.strides)
    if case.shape == of_vllm.PER_GROUP or kind == "layer":
        # vLLM divides groups by their scales; multiplied by the inverse some ties go to the other neighbour.
        other = bytes_of(found.data).int() - bytes_of(data).int()
        assert other.abs().max() <= 1
        assert (other == 0).double().mean() > 0.99
    else:
        assert torch.equal(bytes_of(found.data), bytes_of(data))


class FlashInferCutlassMxfp8LinearKernel:
    """Named as vLLM's is, which reads scales in tiles."""


@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
def test_mxfp8_is_that_of_vllm_to_the_byte(layers: Any, ran: list[str], adds: bool) -> None:
    if not hasattr(sys.modules[of_vllm.FUSION], "get_input_quant_key"):
        pytest.skip("vLLM before 0.33 scales MXFP8 to values below 2, where these kernels scale to 448")
    norm, x, residual = layers.RMSNorm(N, dtype=torch.bfloat16), rows(), rows() if adds else None
    layer = linear("kMxfp8Dynamic")
    layer.quant_method = SimpleNamespace(kernel=FlashInferCutlassMxfp8LinearKernel())
    quantise = importlib.import_module(of_vllm.MXFP8)._mxfp8_e4m3_quantize_torch
    y, _ = normalised(norm, x, residual)
    data, scale = quantise(y.view(-1, N), True)
    found, _ = fused(norm, x, layer, residual)
    assert ran[-1] == "quantised_rms_norm"
    assert (found.data.dtype, found.data.shape, found.orig_shape) == (torch.float8_e4m3fn, x.shape, x.shape)
    assert torch.equal(bytes_of(found.data), bytes_of(data))
    assert (found.scale.dtype, found.scale.shape) == (torch.uint8, scale.shape)
    assert torch.equal(found.scale, scale)


@pytest.mark.parametrize("adds", [False, True], ids=["", "adds"])
def test_nvfp4_is_that_of_vllm(layers: Any, ran: list[str], adds: bool) -> None:
    norm, x, residual = layers.RMSNorm(N, dtype=torch.bfloat16), rows(), rows() if adds else None
    wide = torch.tensor(448 * 6 / 4.0)
    y, _ = normalised(norm, x, residual)
    values, scale = importlib.import_module(of_vllm.NVFP4).ref_nvfp4_quant(y.view(-1, N), wide, 16)
    found, _ = fused(norm, x, linear("kNvfp4Dynamic", input_global_scale_inv=wide), residual)
    assert ran[-1] == "quantised_rms_norm"
    assert (found.data.dtype, found.data.shape, found.orig_shape) == (torch.uint8, (*x.shape[:-1], N // 2), x.shape)
    assert (found.scale.dtype, found.scale.shape) == (torch.float8_e4m3fn, (128, 20))
    torch.testing.assert_close(unswizzled(found.scale.float(), 6, 20), scale.view(6, 20), rtol=0, atol=0)
    codes = unpacked(found.data).view(6, N)
    signed = of_vllm.E2M1[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    # vLLM multiplies by a rounded inverse; a value that is halfway may get the other neighbour.
    assert (signed == values).double().mean() > 0.99
    assert (signed - values).abs().max() <= 2


def test_powers_of_two_are_packed_where_vllm_packs_them(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = layers.RMSNorm(N), rows()
    own = quantiser(of_vllm.PER_GROUP, use_ue8m0=True, column_major_scales=True)
    layer = linear("kFp8Dynamic128Sym", own)
    plain = plug.maybe_fused_norm_quant(norm, x, layer)
    oracle = importlib.import_module(of_vllm.DEEP_GEMM).DeepGemmQuantScaleFMT
    monkeypatch.setattr(oracle, "from_oracle", classmethod(lambda cls: cls.UE8M0))
    own.use_deep_gemm_supported = True
    packed = plug.maybe_fused_norm_quant(norm, x, layer)
    assert (packed.scale.dtype, packed.scale.shape, packed.scale.stride()) == (torch.int32, (6, 1), (1, 8))
    exponents = torch.stack([packed.scale[:, 0] >> 8 * byte & 255 for byte in range(4)], -1)
    torch.testing.assert_close(torch.exp2(exponents[:, :3].float() - 127), plain.scale, rtol=0, atol=0)
    assert exponents[:, 3].eq(0).all()
    assert torch.equal(bytes_of(packed.data), bytes_of(plain.data))


@pytest.mark.parametrize("layers", ["stand-in"], indirect=True)
def test_the_fp8_of_rocms_older_gpus_is_served_by_rows(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = layers.RMSNorm(N, dtype=torch.bfloat16), rows()
    for name, is_served in (("kFp8DynamicTokenSym", True), ("kFp8Dynamic128Sym", False)):
        narrow = of_vllm.QuantKey(torch.float8_e4m3fnuz, name)
        monkeypatch.setattr(sys.modules[of_vllm.QUANT], name, narrow)
        found = plug.maybe_fused_norm_quant(norm, x, linear(name))
        if is_served:
            assert found.data.dtype is torch.float8_e4m3fnuz
            found = found.data.float() * found.scale
        torch.testing.assert_close(found.float(), norm(x).float(), rtol=0.07, atol=0.02)


def test_a_linear_that_takes_other_rows_gets_the_norms_own(layers: Any, ran: list[str]) -> None:
    norm, x = layers.RMSNorm(N), rows()
    narrow = layers.RMSNorm(N, var_hidden_size=N // 2)
    shared = linear("kFp8DynamicTokenSym")
    shared.requires_unquantized_input = True
    # Releases before 0.33 set no key then.
    del shared.input_quant_key
    groups = "kFp8Dynamic128Sym"
    for layer in (
        linear(None),
        linear("kMxfp4Dynamic"),
        # No global scale, and a kernel that may read scales elsewhere than in tiles.
        linear("kNvfp4Dynamic"),
        linear("kMxfp8Dynamic"),
        shared,
        # No scale, two, or one elsewhere or of another type.
        linear("kFp8StaticTensorSym"),
        linear("kFp8StaticTensorSym", input_scale=torch.ones(2)),
        linear("kFp8StaticTensorSym", input_scale=torch.ones((), device="meta")),
        linear("kFp8StaticTensorSym", input_scale=torch.ones((), dtype=torch.float64)),
        linear("kFp8DynamicTokenSym", input_scale_ub=torch.ones(2)),
        linear(groups, quantiser((1, 64))),
        linear(groups, quantiser(of_vllm.PER_GROUP, num_token_padding=17)),
    ):
        torch.testing.assert_close(plug.maybe_fused_norm_quant(norm, x, layer), norm(x), rtol=0, atol=0)
        torch.testing.assert_close(plug.maybe_fused_norm_quant(norm, x, layer, x), norm(x, x), rtol=0, atol=0)
    token = linear("kFp8DynamicTokenSym")
    torch.testing.assert_close(plug.maybe_fused_norm_quant(narrow, x, token), narrow(x), rtol=0, atol=0)
    assert ran == []


def test_a_kernel_that_may_not_be_compiled_leaves_both_to_vllm(layers: Any, leaves: engines.Leaves) -> None:
    norm, x, layer = layers.RMSNorm(N), rows(), linear("kFp8DynamicTokenSym")
    call = partial(plug.maybe_fused_norm_quant, norm, x, layer)
    leaves(plug, "quantised_rms_norm", lambda: (call(), norm(x)), "a norm and its quantisation to vLLM")


# TorchDynamo keeps the modules that it saw imported: in a process with stand-ins it has no use for others.
@pytest.mark.parametrize("layers", ["stand-in"], indirect=True)
def test_a_compiled_model_quantises_without_a_break(layers: Any) -> None:
    norm, x, residual = layers.RMSNorm(N), rows(), rows()
    torch._dynamo.reset()
    for case in (CASES["static"], CASES["columns"]):
        layer = linear(case.key, quantiser(case.shape, **case.options), **case.layer)
        step = partial(_step, norm, layer)
        due, found = (each(x, residual) for each in (step, torch.compile(step, backend="aot_eager", fullgraph=True)))
        for one, other in zip(found, due, strict=True):
            assert one.stride() == other.stride()
            assert torch.equal(bytes_of(one), bytes_of(other))


def _step(norm: Any, layer: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found, summed = plug.maybe_fused_norm_quant(norm, x, layer, residual)
    return found.data, found.scale, summed

"""Norms of JAX arrays on a card: the kernels themselves, launched by jaxlib, against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from normforge import reference

from .settled import jax  # first, since it skips

import normforge.jax as norms  # isort: skip
from normforge.jax.launches import lowered_for

from .operations import arrays
from .test_functions import double, normalised

jnp = jax.numpy
pytestmark = pytest.mark.gpu

CASES = [(4, 64), (16, 512), (32, 1024), (128, 2048), (256, 4096)]


@pytest.fixture(autouse=True)
def _here() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip(
            f"JAX {jax.__version__} runs on {jax.default_backend()} here: it has no plugin for this machine's GPU"
        )


def gradients(norm: str, x: Any, weight: Any, bias: Any, dy: Any) -> list[Any]:
    """The norm and its gradients, of one program."""

    def program(*operands: Any) -> Any:
        *given, cotangent = operands
        if norm == "layer":
            y, back = jax.vjp(lambda x, w, b: norms.layer_norm(x, w, b, 1e-5), *given)
        else:
            y, back = jax.vjp(lambda x, w, b: norms.rms_norm(x, w, 1e-5, weight_offset=1.0), *given)
        return y, *back(cotangent)

    compiled = jax.jit(program).lower(x, weight, bias, dy).compile()
    assert "triton_kernel_call" in compiled.as_text()
    made, again = compiled(x, weight, bias, dy), compiled(x, weight, bias, dy)
    assert all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in zip(made, again, strict=True))
    return list(made)


def agree(norm: str, shape: tuple[int, ...], dtype: str, atol: float, rtol: float) -> None:
    x, dy = arrays(1, shape, dtype, 2)
    weight, bias = arrays(2, shape[-1:], "float32", 2)
    found = gradients(norm, x, weight, bias, dy)
    leaves = [double(operand).requires_grad_() for operand in (x, weight, bias)]
    expected = normalised(norm, *leaves)
    torch.autograd.backward(expected, double(dy))
    for actual, wanted in zip(found, (expected, *(leaf.grad for leaf in leaves)), strict=True):
        wanted = torch.zeros_like(leaves[2]) if wanted is None else wanted.detach()
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted.numpy(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_layer_norm(shape: tuple[int, int]) -> None:
    agree("layer", shape, "float32", atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("norm", "shape", "dtype"),
    [
        ("rms", (128, 2048), "float32"),
        ("layer", (3, 100, 4096), "bfloat16"),
        ("rms", (300, 1000), "float16"),
        # Where nothing starts at a multiple of 16 bytes; where programs of torch's launches wait for one another.
        ("rms", (300, 5137), "bfloat16"),
        ("layer", (300, 20000), "bfloat16"),
    ],
)
def test_other_types_and_lengths(norm: str, shape: tuple[int, ...], dtype: str) -> None:
    """Of 16 bits a gradient is one rounding off, and a sum over rows an fp32 one."""
    exact = dtype == "float32"
    agree(norm, shape, dtype, atol=1e-4 if exact else 4e-2, rtol=1e-3 if exact else 1e-2)


def test_add() -> None:
    """Both outputs, and gradients of both."""
    x, residual, dy, dsum = arrays(1, (300, 1024), "bfloat16", 4)
    (weight,) = arrays(2, (1024,))

    def program(x: Any, residual: Any, weight: Any) -> Any:
        made, back = jax.vjp(norms.add_rms_norm, x, residual, weight)
        return *made, *back((dy, dsum))

    y, total, dx, dresidual, dweight = jax.jit(program)(x, residual, weight)
    leaves = [double(operand).requires_grad_() for operand in (x, residual, weight)]
    s = leaves[0] + leaves[1]
    expected = torch.nn.functional.rms_norm(s, (1024,), leaves[2], 1e-6)
    torch.autograd.backward([expected, s], [double(dy), double(dsum)])
    wanted = (expected.detach(), s.detach(), *(leaf.grad for leaf in leaves))
    for actual, exact in zip((y, total, dx, dresidual, dweight), wanted, strict=True):
        assert exact is not None
        # The gradient reads the rounded sum.
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact.numpy(), atol=0.1, rtol=1e-2)


@pytest.mark.parametrize("out_dtype", ["int8", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_quantised(out_dtype: str) -> None:
    x, residual = arrays(1, (300, 1024), "bfloat16", 2)
    weight, smooth = arrays(2, (1024,), "float32", 2)
    call = jax.jit(lambda *o: norms.quantised_rms_norm(*o[:2], residual=o[2], smooth_scale=o[3], out_dtype=out_dtype))
    made = call(x, weight, residual, smooth)
    expected = reference.rmsnorm2d_fwd(
        double(x).bfloat16(),
        double(weight).float(),
        eps=1e-6,
        residual=double(residual).bfloat16(),
        fadd="pre_add_store",
        smooth_scale=double(smooth).float(),
        fquant="smooth_dynamic",
        out_dtype=getattr(torch, out_dtype),
    )
    assert expected.y_scale is not None
    assert expected.residual_out is not None
    np.testing.assert_array_equal(np.asarray(made.residual_out, np.float32), expected.residual_out.float().numpy())
    np.testing.assert_allclose(made.y_scale, expected.y_scale.numpy(), rtol=1e-5)
    wanted = expected.y.float().numpy()
    steps = np.abs(np.asarray(made.y, np.float32) - wanted)
    assert (steps <= (1 if out_dtype == "int8" else 0.13 * np.abs(wanted))).all()
    assert (steps > 0).mean() < 0.01


def test_vmap_and_rows_that_are_none() -> None:
    x, weight = arrays(1, (4, 16, 512))[0], arrays(2, (512,))[0]
    mapped = jax.jit(jax.vmap(lambda x: norms.rms_norm(x, weight)))(x)
    np.testing.assert_array_equal(mapped, jax.jit(norms.rms_norm)(x, weight))
    assert norms.rms_norm(x[:0], weight).shape == (0, 16, 512)


def test_the_gpu_is_what_kernels_are_chosen_for() -> None:
    properties = torch.cuda.get_device_properties(0)
    found = lowered_for()
    assert found.arch == f"sm_{properties.major}{properties.minor}"
    assert found.multiprocessors == properties.multi_processor_count
    assert found.plainly


def test_a_flax_model_trains_as_with_flaxs_own_norms() -> None:
    """The losses of 20 steps: of an MLP with a residual, LayerNorm and a fused add."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")

    class Block(linen.Module):  # type: ignore[misc, name-defined]  # a module that may be missing
        fused: bool

        @linen.compact  # type: ignore[untyped-decorator]  # likewise
        def __call__(self, x: Any) -> Any:
            scales = [self.param(f"scale{at}", linen.initializers.ones, (256,)) for at in range(2)]
            biases = [self.param(f"bias{at}", linen.initializers.zeros, (256,)) for at in range(2)]
            h = linen.Dense(256)(self._norm(x, scales[0], biases[0]))
            if self.fused:
                y, total = norms.add_layer_norm(linen.gelu(h), x, scales[1], biases[1])
            else:
                total = linen.gelu(h) + x
                y = self._norm(total, scales[1], biases[1])
            return linen.Dense(256)(y) + total

        def _norm(self, x: Any, scale: Any, bias: Any) -> Any:
            if self.fused:
                return norms.layer_norm(x, scale, bias)
            centred = x - x.mean(-1, keepdims=True)
            return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias

    x, wanted = arrays(1, (64, 256), n=2)

    def losses(fused: bool) -> list[float]:
        model = Block(fused)
        parameters = Block(False).init(jax.random.key(0), x)

        @jax.jit  # type: ignore[untyped-decorator]  # types of JAX are not read
        def step(parameters: Any) -> Any:
            loss, slope = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - wanted) ** 2))(parameters)
            return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, slope), loss

        found = []
        with jax.default_matmul_precision("highest"):
            for _ in range(20):
                parameters, loss = step(parameters)
                found.append(float(loss))
        return found

    ours, theirs = losses(True), losses(False)
    assert ours[-1] < 0.9 * ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)

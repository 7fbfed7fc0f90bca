"""Norms of JAX arrays on a card: the kernels themselves, launched by jaxlib, against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .settled import jax  # first, since it skips

import normforge.jax as norms  # isort: skip
from normforge.jax.launches import lowered_for

from .operations import arrays
from .test_functions import check_gradients, check_quantised

jnp = jax.numpy
pytestmark = pytest.mark.gpu

CASES = [(4, 64), (16, 512), (32, 1024), (128, 2048), (256, 4096)]


@pytest.fixture(autouse=True)
def _here() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip(
            f"JAX {jax.__version__} runs on {jax.default_backend()} here: it has no plugin for this machine's GPU"
        )


@pytest.mark.parametrize(
    ("norm", "adds", "shape", "dtype"),
    [
        *(("layer", "", shape, "float32") for shape in CASES),
        ("rms", "", (128, 2048), "float32"),
        ("layer", "", (3, 100, 4096), "bfloat16"),
        ("rms", "", (300, 1000), "float16"),
        # Where nothing starts at a multiple of 16 bytes; where programs of torch's launches wait for one another.
        ("rms", "", (300, 5137), "bfloat16"),
        ("layer", "", (300, 20000), "bfloat16"),
        ("rms", "before", (300, 1024), "bfloat16"),
        ("rms", "behind", (300, 1024), "bfloat16"),
        ("l2", "", (300, 128), "bfloat16"),
    ],
)
def test_values_and_gradients(norm: str, adds: str, shape: tuple[int, ...], dtype: str) -> None:
    """Of 16 bits a gradient is one rounding off, or two of a sum, and a sum over rows an fp32 one."""
    exact = dtype == "float32"
    atol = 1e-4 if exact else 0.1 if adds else 4e-2
    text = check_gradients(norm, adds, dtype, shape, atol, 1e-3 if exact else 1e-2, scale=1)
    assert "triton_kernel_call" in text


@pytest.mark.parametrize("out_dtype", ["int8", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_quantised(out_dtype: str) -> None:
    check_quantised("rms", out_dtype, (300, 1024))


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

"""Norms of JAX arrays on a card: the kernels themselves, launched by jaxlib, against fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from .settled import jax  # first, since it skips

import normforge.jax as norms  # isort: skip
from normforge.jax.launches import lowered_for

from .settled import arrays
from .test_functions import HEADS, check_gradients, check_heads, check_quantised, check_several

jnp = jax.numpy
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _here() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip(
            f"JAX {jax.__version__} runs on {jax.default_backend()} here: it has no plugin for this machine's GPU"
        )


@pytest.mark.parametrize(
    ("norm", "form", "shape", "dtype"),
    [
        *(("layer", "", shape, "float32") for shape in ((4, 64), (16, 512), (32, 1024), (128, 2048), (256, 4096))),
        ("rms", "", (128, 2048), "float32"),
        ("layer", "", (3, 100, 4096), "bfloat16"),
        ("rms", "", (300, 1000), "float16"),
        # Where nothing starts at a multiple of 16 bytes; where programs of torch's launches wait for one another.
        ("rms", "", (300, 5137), "bfloat16"),
        ("layer", "", (300, 20000), "bfloat16"),
        ("rms", "before", (300, 1024), "bfloat16"),
        ("rms", "behind", (300, 1024), "bfloat16"),
        ("rms", "between", (300, 1024), "bfloat16"),
        ("l2", "", (300, 128), "bfloat16"),
        *((norm, "channels", (8, 192, 14, 14), "bfloat16") for norm in ("layer", "rms", "l2")),
        ("rms", "silu", (2, 2100, 5, 31), "bfloat16"),
        ("layer", "statistics", (300, 4096), "float32"),
        ("rms", "statistics", (300, 4096), "float32"),
    ],
)
def test_values_and_gradients(norm: str, form: str, shape: tuple[int, ...], dtype: str) -> None:
    """Of 16 bits a gradient is one rounding off, two of a sum, or four of two norms; a sum over rows is an fp32 one."""
    exact = dtype == "float32"
    atol = 1e-4 if exact else {"": 4e-2, "between": 0.2}.get(form, 0.1)
    text = check_gradients(norm, form, dtype, shape, atol, 1e-3 if exact else 1e-2, scale=1)
    # Statistics that are differentiated come from a formula.
    assert ("triton_kernel_call" in text) is (form != "statistics")


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_statistics(norm: str) -> None:
    x, function = arrays(1, (300, 4096))[0], jax.jit(getattr(norms, f"{norm}_statistics"))
    assert "triton_kernel_call" in function.lower(x).compile().as_text()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), function(x), jax.vjp(function, x)[0])


@pytest.mark.parametrize("out_dtype", ["int8", "float8_e4m3fn", "float8_e4m3fnuz"])
def test_quantised(out_dtype: str) -> None:
    check_quantised("rms", out_dtype, (300, 1024))


def test_several_norms_at_once() -> None:
    """Whose warps may differ from those of each alone, so that a value is a step off."""
    check_several(rtol=2e-2, atol=1.0)


@pytest.mark.parametrize("case", HEADS)
def test_heads(case: Any) -> None:
    check_heads(case)


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

"""jit, vmap and derivatives of norms, each as of the same norm written in jax.numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .settled import jax  # first, since it skips

import normforge.jax as norms  # isort: skip

from ..thorough import THOROUGH
from .operands import arrays

jnp = jax.numpy


def by_hand(x: Any, weight: Any, bias: Any) -> Any:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * weight + bias


def close(actual: Any, expected: Any, atol: float = 1e-4) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=1e-4)


AXES = ((0, None, None), (1, None, None), (None, 0, 0), (0, 0, None))


@pytest.mark.parametrize("axes", [pytest.param(a, id=str(a), marks=[THOROUGH] * (a != AXES[0])) for a in AXES])
def test_vmap(axes: tuple[int | None, ...]) -> None:
    """Over rows, whose batch dimension may lie anywhere, and over weights; of values and of gradients for each."""
    (x,) = arrays(1, (4, 4, 24))
    weight, bias = arrays(2, (24,), n=2)
    operands = [
        operand if axis is None or operand.ndim == 3 else jnp.stack([operand, 2 * operand, -operand, 0 * operand])
        for operand, axis in zip((x, weight, bias), axes, strict=True)
    ]

    def gradients(norm: Any) -> Any:
        return jax.jit(jax.vmap(jax.value_and_grad(lambda *o: jnp.sum(norm(*o) ** 3), (0, 1, 2)), axes))

    close(jax.vmap(norms.layer_norm, axes)(*operands), jax.vmap(by_hand, axes)(*operands))
    close(gradients(norms.layer_norm)(*operands), gradients(by_hand)(*operands), atol=2e-3)


@THOROUGH
def test_a_gradient_of_what_is_mapped() -> None:
    """Weights' gradients are sums over the batch."""
    (x,), (weight, bias) = arrays(1, (5, 3, 24)), arrays(2, (24,), n=2)

    def loss(norm: Any) -> Any:
        return jax.grad(lambda *o: jnp.sum(jax.vmap(norm, (0, None, None))(*o) ** 3), (0, 1, 2))

    close(loss(norms.layer_norm)(x, weight, bias), loss(by_hand)(x, weight, bias), atol=2e-3)


@THOROUGH
def test_vmap_of_quantised_rows_and_of_residuals_that_are_shared() -> None:
    x, residual = arrays(1, (3, 4, 24), n=2)
    made = jax.vmap(lambda x: norms.quantised_rms_norm(x, residual=residual[0]))(x)
    for at in range(3):
        alone = norms.quantised_rms_norm(x[at], residual=residual[0])
        assert all((one[at] == other).all() for one, other in zip(made, alone, strict=True))


@THOROUGH
def test_a_gradients_gradient() -> None:
    (x,), (weight, bias) = arrays(1, (3, 24)), arrays(2, (24,), n=2)

    def second(norm: Any) -> Any:
        first = jax.grad(lambda *o: jnp.sum(norm(*o) ** 3), (0, 1, 2))
        return jax.grad(lambda *o: sum(jnp.sum(g**2) for g in first(*o)), (0, 1, 2))

    close(second(norms.layer_norm)(x, weight, bias), second(by_hand)(x, weight, bias), atol=0.5)


@THOROUGH
def test_checkpoint_and_scan() -> None:
    """As layers of a model are: each normalises what the last one made."""
    (x,), (weights,) = arrays(1, (3, 24)), arrays(2, (6, 24))

    def loss(norm: Any, weights: Any) -> Any:
        step = jax.checkpoint(lambda x, weight: (norm(x, weight, weight), None))
        return jnp.sum(jax.lax.scan(step, x, weights)[0] ** 3)

    found, expected = (
        jax.jit(jax.grad(lambda w, norm=norm: loss(norm, w)))(weights) for norm in (norms.layer_norm, by_hand)
    )
    close(found, expected, atol=2e-2)

"""Norms of arrays that lie on several devices: rows stay where they are, and gradients of weights are added up."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from .settled import jax  # first, since it skips

import normforge.jax as norms  # isort: skip

from ..thorough import THOROUGH
from .operands import arrays

jnp, P = jax.numpy, jax.sharding.PartitionSpec

_COLLECTIVES = re.compile(r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")

ROWS = [P("a", "b"), P(("a", "b")), P(None, "b"), P("a", "b", None)]


def mesh(kind: str = "Auto") -> Any:
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)


def operands() -> list[Any]:
    (x,), (weight, bias) = arrays(1, (8, 4, 32)), arrays(2, (32,), n=2)
    return [x, weight, bias]


def loss(x: Any, weight: Any, bias: Any) -> Any:
    y, total = norms.add_layer_norm(x, x, weight, bias)
    return jnp.sum(y**2) + jnp.sum(total * y)


def communicated(compiled: Any) -> list[str]:
    return sorted(_COLLECTIVES.findall(compiled.as_text()))


def close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, rtol=1e-4)


@pytest.fixture(params=[True, False], ids=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Any:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.usefixtures("partitioner")
@pytest.mark.parametrize("spec", [pytest.param(s, id=str(s), marks=[THOROUGH] * (s is not ROWS[0])) for s in ROWS])
def test_rows_are_not_sent(spec: Any) -> None:
    """What the devices exchange is one sum each of the gradients of weight and bias."""
    x, weight, bias = operands()
    lying = jax.device_put(x, jax.sharding.NamedSharding(mesh(), spec))
    forward = jax.jit(lambda *o: norms.quantised_layer_norm(*o, residual=o[0]))
    assert communicated(forward.lower(lying, weight, bias).compile()) == []
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    compiled = gradient.lower(lying, weight, bias).compile()
    assert set(communicated(compiled)) == {"all-reduce"}
    found = gradient(lying, weight, bias)
    assert found[0].sharding.is_equivalent_to(lying.sharding, 3)
    assert found[1].sharding.is_fully_replicated
    close(found, jax.grad(loss, (0, 1, 2))(x, weight, bias))


@THOROUGH
@pytest.mark.usefixtures("partitioner")
def test_rows_that_are_cut_are_gathered() -> None:
    x, weight, bias = operands()
    cut = jax.device_put(x, jax.sharding.NamedSharding(mesh(), P("a", None, "b")))
    close(jax.jit(jax.grad(loss, (0, 1, 2)))(cut, weight, bias), jax.grad(loss, (0, 1, 2))(x, weight, bias))


def test_a_sum_over_devices_is_rounded_once() -> None:
    """In bf16, 257 is 256 and 259 is 260: of devices that round, 3 * 257 + 259 comes to 1024, and it is 1032."""
    (x,), bias = arrays(1, (4, 1, 32)), jnp.zeros(32, "bfloat16")
    due = jnp.array([257.0, 257.0, 257.0, 259.0])[:, None, None]
    gradient = jax.jit(jax.grad(lambda x, bias: jnp.sum(norms.layer_norm(x, None, bias) * due), 1))
    lying = jax.device_put(x, jax.sharding.NamedSharding(mesh(), P(("a", "b"))))
    assert gradient(lying, bias).tolist() == [1032.0] * 32


@THOROUGH
def test_in_an_explicit_mesh_types_say_where_results_lie() -> None:
    x, weight, bias = operands()
    explicit = mesh("Explicit")
    lying = jax.device_put(x, jax.sharding.NamedSharding(explicit, P("a", "b")))
    cut = jax.device_put(x, jax.sharding.NamedSharding(explicit, P("a", None, "b")))
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    with jax.set_mesh(explicit):
        made = jax.jit(lambda *o: norms.quantised_layer_norm(*o))(lying, weight, bias)
        found, gathered = gradient(lying, weight, bias), gradient(cut, weight, bias)
        assert set(communicated(gradient.lower(lying, weight, bias).compile())) == {"all-reduce"}
    assert made.y.sharding.spec == P("a", "b", None)
    assert made.y_scale.sharding.spec == P("a", "b")
    assert gathered[0].sharding.spec == P("a", None, "b")
    expected = jax.grad(loss, (0, 1, 2))(x, weight, bias)
    close(found, expected)
    close(gathered, expected)


@pytest.mark.parametrize("checked", [True, pytest.param(False, marks=THOROUGH)])
def test_shard_map(checked: bool) -> None:
    """Gradients of what every device has alike are summed over them, whether JAX keeps account of that or not."""
    x, weight, bias = operands()
    specs = {"in_specs": (P("a", "b"), P(), P()), "out_specs": P("a", "b"), "check_vma": checked}
    mapped = jax.shard_map(norms.layer_norm, mesh=mesh(), **specs)

    def gradient(norm: Any) -> Any:
        return jax.jit(jax.grad(lambda *o: jnp.sum(norm(*o) ** 3), (0, 1, 2)))

    close(gradient(mapped)(x, weight, bias), gradient(norms.layer_norm)(x, weight, bias))

"""What calls launch, each in the interpreter in place of a GPU; and norms of arrays that lie on several devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import normforge.jax as norms
from normforge.codegen.groups import Span
from normforge.codegen.values import Norm
from normforge.jax import launches, primitive
from normforge.jax.launches import Code
from normforge.kernels.gpu import KernelKey, Target
from normforge.kernels.launcher import interpret
from normforge.selection import dispatch
from normforge.selection.table import Source
from normforge.upstream import jaxlib_triton
from proving.cases import formula

from ..thorough import THOROUGH
from .settled import arrays, jax
from .test_functions import (
    CHANNELS,
    HEADS,
    as_array,
    as_tensor,
    called,
    case_of,
    check_gradients,
    check_heads,
    check_quantised,
    check_several,
    double,
    near,
    of_cubes,
)

# Few, so that a handful of rows makes each program take several in turn.
TARGET = Target("sm_90", 32, 2, compiles=False, plainly=True)


class Interpreter:
    """Stands for jaxlib and a GPU: runs a custom call's kernel on the arrays that it is given."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._kernel: tuple[KernelKey, Source] | None = None
        self._launch: tuple[Sequence[int], Sequence[Any]] = ((), ())

    def code_of(self, key: KernelKey, source: Source, target: Target) -> Code:
        self._kernel = key, source
        return Code(key.symbol, "", 1, 0)

    def message(self, *about: Any) -> bytes:
        *_, grid, parameters = about
        self._launch = grid, parameters
        return b""

    def ffi_call(self, target: str, results: Sequence[Any]) -> Callable[..., Any]:
        assert target == jaxlib_triton.TARGET

        assert self._kernel is not None
        key, source = self._kernel

        def run(grid: Sequence[int], parameters: Sequence[Any], *given: Any) -> list[Any]:
            # What is not written stays what no result is.
            made = [torch.full(result.shape, -77, dtype=getattr(torch, str(result.dtype))) for result in results]
            buffers = iter([*map(as_tensor, given), *made])
            told = iter(parameters)
            values = []
            for _, word in key.arguments:
                brought = isinstance(word, str)
                parameter = next(told) if brought else None
                values.append(word if not brought else next(buffers) if parameter is None else parameter[0])
            assert next(told, None) is None
            assert next(buffers, None) is None
            self.ran.append(key.symbol)
            interpret(source.load(), tuple(grid), values, {})
            return [as_array(tensor) for tensor in made]

        def call(*given: Any, name: str, opaque: bytes) -> Any:
            assert name == key.symbol
            return jax.pure_callback(partial(run, *self._launch), results, *given)

        return call


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    """Have programs on the CPU launch kernels where they have the formula otherwise."""
    found = Interpreter()
    monkeypatch.setattr(launches, "lowered_for", lambda: TARGET)
    monkeypatch.setattr(launches, "code_of", found.code_of)
    monkeypatch.setattr(jaxlib_triton, "message", found.message)
    monkeypatch.setattr(jax.ffi, "ffi_call", found.ffi_call)
    monkeypatch.setattr(primitive, "computed", launches.launched)
    jax.clear_caches()
    yield found
    jax.clear_caches()


def shapes(*some: tuple[int, ...]) -> list[Any]:
    """The first of some shapes, and the others as thorough ones."""
    return [pytest.param(shape, id=str(shape), marks=[THOROUGH] if shape != some[0] else []) for shape in some]


OTHERS = [pytest.param(*case, marks=THOROUGH) for case in (("layer", ""), ("layer", "behind"), ("rms", "between"))]


@pytest.mark.parametrize("shape", shapes((7, 64), (2, 3, 700), (2, 2, 1500), (3, 9000)))
@pytest.mark.parametrize(("norm", "adds"), [("rms", "before"), ("layer", "between"), *OTHERS])
def test_values_and_gradients(norm: str, adds: str, shape: tuple[int, ...], interpreter: Interpreter) -> None:
    check_gradients(norm, adds, "float32", shape, 2e-5, 1e-5, scale=5)
    assert "sum_partials" in interpreter.ran


@pytest.mark.parametrize(
    ("norm", "form", "shape"), [*CHANNELS, ("layer", "silu", (2, 2100, 3)), ("rms", "channels", (2, 2100, 3))]
)
def test_channels(norm: str, form: str, shape: tuple[int, ...], interpreter: Interpreter) -> None:
    """Of channels that a program holds, and that it reads twice."""
    check_gradients(norm, form, "float32", shape, 2e-5, 1e-5, scale=5)
    mode, held = f"{Span.over(Norm(norm)).prefix}_{{}}_fp32{'_silu' * (form == 'silu')}_{{}}".format, shape[1] < 2000
    forward = mode("fwd", "one_pass" if held else "two_pass")
    backward = [mode("bwd", part) for part in (["one_pass"] if held else ["row_terms", "two_pass"])]
    assert interpreter.ran == [*2 * [forward, *backward, "sum_partials"], forward]


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_statistics(norm: str, interpreter: Interpreter) -> None:
    case, (x,) = case_of(norm, "statistics", ()), arrays(1, (5, 96))
    for found, wanted in zip(called(case, {"x": x}), formula(case, {"x": double(x)}), strict=True):
        np.testing.assert_allclose(found, wanted, 1e-5)
    (kernel,) = interpreter.ran
    assert kernel.endswith("_fwd_fp32_mv_only_one_pass")


@pytest.mark.parametrize("norm", ["layer", pytest.param("rms", marks=THOROUGH)])
def test_norms_without_vectors(norm: str, interpreter: Interpreter) -> None:
    check_gradients(norm, "before", "float32", (5, 64), 2e-5, 1e-5, without=("weight", "bias"))
    assert "sum_partials" not in interpreter.ran


@THOROUGH
def test_gradients_of_16_bits_and_of_some_vectors(interpreter: Interpreter) -> None:
    check_gradients("layer", "before", "bfloat16", (5, 64), 4e-2, 1e-2, without=("bias",))


@pytest.mark.parametrize(
    "out_dtype", ["int8", *(pytest.param(f"float8_{kind}", marks=THOROUGH) for kind in ("e4m3fn", "e4m3fnuz"))]
)
def test_quantised(out_dtype: str, interpreter: Interpreter) -> None:
    check_quantised("layer", out_dtype, (3, 200))
    assert interpreter.ran


@pytest.mark.parametrize("generates", [True, pytest.param(False, marks=THOROUGH)])
def test_several_norms(generates: bool, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch, and in a launch each where nothing is generated."""
    monkeypatch.setenv("NORMFORGE_ON_MISS", "generate" if generates else "error")
    with dispatch.using(dispatch.loaded()):
        check_several()
    together = [name for name in interpreter.ran if name.startswith("several_")]
    assert len(together) == 2 * generates


@pytest.mark.parametrize("case", HEADS)
def test_heads(case: Any, interpreter: Interpreter) -> None:
    """Weights of one length are added up by one kernel, and of two lengths by two; no tokens are walked by none."""
    check_heads(case)
    across = "_across" if case.norm.endswith("_across_heads") else ""
    sums = ["sum_partials"] * (len({case.q_heads, case.k_heads}) if across else 1) * case.weights
    walks = [f"qk_norm_rope{across}_{way}" for way in ("fwd", "bwd") if case.tokens]
    assert interpreter.ran == [*walks, *sums, *walks[:1]]


@THOROUGH
def test_rows_that_start_anywhere(interpreter: Interpreter) -> None:
    """Rows of 16 bits that no vector starts have a kernel of their own, which has one stride for x and y."""
    check_gradients("rms", "", "bfloat16", (3, 1501), 4e-2, 1e-2)
    assert interpreter.ran[0].endswith("_window")


def test_programs_share_rows_as_many_as_the_gpu_runs(interpreter: Interpreter) -> None:
    """More rows than programs: each leaves one row of partial sums, and the last kernel adds them up."""
    check_gradients("rms", "", "float32", (40, 64), 2e-5, 1e-5, scale=5)


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


def laid(x: Any, *spec: Any, on: str = "Auto") -> Any:
    return jax.device_put(x, jax.sharding.NamedSharding(mesh(on), P(*spec)))


def close(found: Any, expected: Any) -> None:
    near(found, expected, atol=2e-4)


def check_sums_alone_are_sent(loss: Any, lying: Any, *given: Any) -> None:
    """Hold the gradients of rows on several devices: what the devices exchange is sums of those of vectors."""
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    assert set(communicated(gradient.lower(lying, *given[1:]).compile())) == {"all-reduce"}
    found = gradient(lying, *given[1:])
    assert found[0].sharding.is_equivalent_to(lying.sharding, lying.ndim)
    assert found[1].sharding.is_fully_replicated
    close(found, jax.grad(loss, (0, 1, 2))(*given))


@pytest.fixture(params=[True, False], ids=["shardy", "gspmd"])
def partitioner(request: pytest.FixtureRequest) -> Any:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.usefixtures("partitioner")
def test_images_are_not_sent() -> None:
    """Samples and positions lie on several devices, and channels on each; so do statistics of rows."""
    given = *arrays(1, (4, 16, 6, 4)), *arrays(2, (16,), n=2)

    def loss(*given: Any) -> Any:
        y = norms.layer_norm(*given, dim=1, activation="silu")
        return jnp.sum(y**3) + sum(map(jnp.sum, norms.layer_statistics(y)))

    check_sums_alone_are_sent(loss, laid(given[0], "a", None, "b"), *given)


@pytest.mark.usefixtures("partitioner")
@pytest.mark.parametrize("spec", [pytest.param(s, id=str(s), marks=[THOROUGH] * (s is not ROWS[0])) for s in ROWS])
def test_rows_are_not_sent(spec: Any) -> None:
    x, weight, bias = operands()
    lying = laid(x, *spec)
    forward = jax.jit(lambda *o: norms.quantised_layer_norm(*o, residual=o[0]))
    assert communicated(forward.lower(lying, weight, bias).compile()) == []
    check_sums_alone_are_sent(loss, lying, x, weight, bias)


def turned(q: Any, k: Any, weight: Any, table: Any, norm: str = "rms") -> Any:
    made = norms.qk_norm_rope(q, k, weight, weight[: len(weight) * k.shape[-2] // q.shape[-2]], table, table, norm=norm)
    return sum(jnp.sum(each**3) for each in made)


# Tokens and heads; the same axis for tokens and for heads, where the keys' heads are sent; heads of one norm.
OF_HEADS = {
    "rms": [(P("a", None, "b"), P("a", None, "b"), 0), (P("a"), P(None, None, "a"), 1)],
    "rms_across_heads": [(P("a", "b"), P("a", "b"), 0), (P("a", None, "b"), P("a", None, "b"), 1)],
}


@THOROUGH
@pytest.mark.usefixtures("partitioner")
@pytest.mark.parametrize(("norm", "at"), [(norm, at) for norm in OF_HEADS for at in range(2)])
def test_heads_are_sent_where_they_are_normalised_together(norm: str, at: int) -> None:
    *specs, sent = OF_HEADS[norm][at]
    (q,), (k,), (table,) = arrays(1, (4, 6, 4, 16)), arrays(2, (4, 6, 4, 16)), arrays(3, (6, 8))
    weight = arrays(4, (64 if norm != "rms" else 16,))[0]
    gradient = jax.jit(jax.grad(partial(turned, norm=norm), (0, 1, 2)))
    lying = [laid(x, *spec) for x, spec in zip((q, k), specs, strict=True)]
    found = communicated(gradient.lower(*lying, weight, table).compile())
    assert (set(found) == {"all-reduce"}) is not bool(sent)
    close(gradient(*lying, weight, table), gradient(q, k, weight, table))


@THOROUGH
@pytest.mark.usefixtures("partitioner")
def test_rows_that_are_cut_are_gathered() -> None:
    x, weight, bias = operands()
    cut = laid(x, "a", None, "b")
    close(jax.jit(jax.grad(loss, (0, 1, 2)))(cut, weight, bias), jax.grad(loss, (0, 1, 2))(x, weight, bias))


def test_a_sum_over_devices_is_rounded_once() -> None:
    """In bf16, 257 is 256 and 259 is 260: of devices that round, 3 * 257 + 259 comes to 1024, and it is 1032."""
    (x,), bias = arrays(1, (4, 1, 32)), jnp.zeros(32, "bfloat16")
    due = jnp.array([257.0, 257.0, 257.0, 259.0])[:, None, None]
    gradient = jax.jit(jax.grad(lambda x, bias: jnp.sum(norms.layer_norm(x, None, bias) * due), 1))
    assert gradient(laid(x, ("a", "b")), bias).tolist() == [1032.0] * 32


@THOROUGH
def test_in_an_explicit_mesh_types_say_where_results_lie() -> None:
    x, weight, bias = operands()
    lying, cut = (laid(x, *spec, on="Explicit") for spec in (("a", "b"), ("a", None, "b")))
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    with jax.set_mesh(mesh("Explicit")):
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
    found, expected = (jax.jit(of_cubes(norm))(x, weight, bias) for norm in (mapped, norms.layer_norm))
    close(found, expected)

"""Norms of JAX arrays, their gradients and transforms, against torch in fp64: on a CPU, the formula for kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import normforge.jax as norms
from normforge import errors, reference
from proving.cases import Case, cases, formula, gradients

from ..calling import table_at
from ..nn import test_rotary as heads
from ..thorough import THOROUGH
from .settled import arrays, jax

jnp = jax.numpy

# Of a rounding to the type, and of fp32 sums.
_L2 = [("l2", ""), ("l2_clamped", "")]
_SUMS = [("layer", "before"), ("rms", "behind"), ("layer", "between")]
_FIRST = [*product(_SUMS, ["bfloat16"]), *product([("rms", ""), *_L2], ["float32"])]
# About as long as rows are, so that some are clamped.
CLAMPED = 6.0
ATOL = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}


def double(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, np.float64))


def close(actual: Any, expected: torch.Tensor, atol: float, rtol: float) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected.detach().double().numpy(), rtol, atol)


# Where a residual is added, if one is; or another form of a norm.
ADDS = ("", "before", "behind", "between")
FAMILIES = {"behind": "added", "between": "renormed", "silu": "channels"}


def case_of(norm: str, form: str, without: tuple[str, ...]) -> Case:
    """The case of torch's function of the same name."""
    family = FAMILIES.get(form, "l2" if norm.startswith("l2") and not form else "plain" if form in ADDS else form)
    absent = (*(("x_bias",) if form in ADDS[1:] else ("residual", "x_bias")), *without)
    (case,) = cases(family, vary=(), norm=norm, without=absent)
    case = case.but(activation="silu") if form == "silu" else case
    offset = case["weight_offset"] is not None and norm == "rms"
    return case.but(weight_offset=1.0) if offset else case.but(eps=CLAMPED) if norm == "l2_clamped" else case


OPTIONS = ("eps", "weight_offset", "next_norm", "dim", "activation")


def called(case: Case, given: dict[str, Any]) -> tuple[Any, ...]:
    """The norm, and the sum if one is stored."""
    told = {name: case.arguments[name] for name in OPTIONS if case.arguments.get(name)}
    made = getattr(norms, case.function.__name__)(**given, **told)
    return made if isinstance(made, tuple) else (made,)


CHANNELS = [
    *[
        (norm, form, (2, 40, 3, 5))
        for norm, form in product(("layer", "rms", "l2", "l2_clamped"), ("channels", "silu"))
    ],
    ("layer", "silu", (3, 40)),
]
STATISTICS = [(norm, "statistics", (3, 4, 48)) for norm in ("layer", "rms")]
CASES = [
    *(
        pytest.param(norm, adds, (3, 4, 48), dtype, marks=[THOROUGH] * (((norm, adds), dtype) not in _FIRST))
        for (norm, adds), dtype in product([*product(("layer", "rms"), ADDS), *_L2], ATOL)
    ),
    *(pytest.param(*case, "float32") for case in (*CHANNELS, *STATISTICS)),
    *(pytest.param(*case, "bfloat16", marks=THOROUGH) for case in (*CHANNELS, *STATISTICS)),
]


def check_gradients(
    norm: str,
    form: str,
    dtype: str,
    shape: tuple[int, ...],
    atol: float,
    rtol: float,
    scale: float = 4,
    without: tuple[str, ...] = (),
) -> str:
    """Hold results and gradients of a program against torch's in fp64, and return the program.

    Of a loss that takes the sum in as well; each gradient has its operand's type, and may be off by `scale` as much.
    """
    case, is_measured = case_of(norm, form, without), form == "statistics"
    names = [row.name for row in case.rows]
    x, residual = arrays(1, shape, dtype, 2)
    arriving = arrays(3, shape[: len(shape) - is_measured], dtype, 2)
    vectors = zip(
        ("weight", "bias", "next_weight", "next_bias"), arrays(2, case.but(shape=shape).size, n=4), strict=True
    )
    every = {"x": x, "residual": residual, **dict(vectors)}
    operands = [every[name] for name in names]

    def loss(*given: Any) -> Any:
        outputs = called(case, dict(zip(names, given, strict=False)))
        products = [y.astype("float32") * dy.astype("float32") for y, dy in zip(outputs, given[-2:], strict=False)]
        return sum(map(jnp.sum, products)), outputs

    program = jax.jit(jax.grad(loss, range(len(names)), has_aux=True)).lower(*operands, *arriving).compile()
    found, outputs = program(*operands, *arriving)
    again = jax.tree.leaves(program(*operands, *arriving))
    assert all(map(np.array_equal, jax.tree.leaves((found, outputs)), again))
    assert {(output.dtype.name, output.shape) for output in outputs} == {
        ("float32" if is_measured else dtype, arriving[0].shape)
    }
    assert [gradient.dtype for gradient in found] == [operand.dtype for operand in operands]

    leaves = {name: double(every[name]).requires_grad_() for name in names}
    wanted = formula(case, leaves)
    # Recorded and not.
    for output, its in zip((*outputs, *called(case, dict(zip(names, operands, strict=True)))), 2 * wanted, strict=True):
        close(output, its, atol, rtol)
    exact = gradients(wanted, leaves, [double(dy) for dy in arriving[: len(wanted)]])
    for name, gradient in zip(names, found, strict=True):
        close(gradient, exact[name], scale * atol, rtol)
    text: str = program.as_text()
    return text


@pytest.mark.parametrize(("norm", "form", "shape", "dtype"), CASES, ids=str)
def test_values_and_gradients(norm: str, form: str, shape: tuple[int, ...], dtype: str) -> None:
    check_gradients(norm, form, dtype, shape, ATOL[dtype], ATOL[dtype])


def test_types_of_each_operand() -> None:
    """A weight and a residual have types of their own, and their gradients too."""
    x, residual = arrays(1, (4, 32), "bfloat16")[0], arrays(2, (4, 32))[0]
    weight = arrays(3, (32,), "float16")[0]
    y, total = norms.add_rms_norm(x, residual, weight)
    assert (y.dtype.name, total.dtype.name) == ("bfloat16", "float32")
    found = jax.grad(lambda *operands: norms.add_rms_norm(*operands)[0].astype("float32").sum(), (0, 1, 2))(
        x, residual, weight
    )
    assert [gradient.dtype.name for gradient in found] == ["bfloat16", "float32", "float16"]
    assert norms.rms_norm_add(x, residual, weight).dtype.name == "float32"


def turned(case: heads.Case, operands: dict[str, Any]) -> Any:
    options = {name: getattr(case, name) for name in heads.OPTIONS if name != "cast"}
    return norms.qk_norm_rope(**operands, **options)


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.float().numpy().astype("bfloat16") if tensor.dtype is torch.bfloat16 else tensor.numpy()


def as_tensor(array: Any) -> torch.Tensor:
    wide = np.array(array, np.float32 if array.dtype.name == "bfloat16" else array.dtype)
    return torch.from_numpy(wide).to(getattr(torch, array.dtype.name))


def check_heads(case: heads.Case) -> None:
    """Hold heads and gradients of a program against torch's formula in fp64, to half of a last place."""
    torch.manual_seed(0)
    operands = heads.leaves_of(heads.given(case))
    whole, wanted = heads.exact(case, operands)
    due = [torch.randn(each.shape).to(case.dtype) for each in wanted]
    given: dict[str, Any] = {name: None if each is None else as_array(each.detach()) for name, each in operands.items()}
    leaves = {name: whole[name] for name in heads.LEAVES if given[name] is not None}

    def program(leaves: Any, due: Any) -> Any:
        results, pull = jax.vjp(lambda own: turned(case, given | own), leaves)
        return results, pull(due)[0]

    results, grads = jax.jit(program)({name: given[name] for name in leaves}, tuple(map(as_array, due)))
    # Recorded and not.
    for result, its in zip((*results, *turned(case, given)), 2 * wanted, strict=True):
        heads.agree(case, as_tensor(result), its)
    exact = gradients(wanted, leaves, [each.double() for each in due])
    for name, found in grads.items():
        assert found.dtype == given[name].dtype
        heads.agree(case, as_tensor(found), exact[name], 8.0 if "weight" in name else 1.0)


# First programs of several tiles, of weights of one length and of two, and positions of three axes.
HEADS = [
    pytest.param(case, id=str(case), marks=[THOROUGH] * (case.tokens < 70 and case.mrope_section != (16, 16, 0)))
    for case in heads.CASES
    if case.cast == "after_weight"
]


@pytest.mark.parametrize("case", HEADS)
def test_heads(case: heads.Case) -> None:
    check_heads(case)


def check_several(rtol: float = 0.0, atol: float = 0.0) -> None:
    """Hold norms of one launch, and gradients, to the functions of each, which other tests hold to fp64."""
    (x, residual), (wide,) = arrays(1, (5, 96), "bfloat16", 2), arrays(2, (3, 2, 160), "bfloat16")
    given = [(x, *arrays(3, (96,)), {"residual": residual}), (wide, *arrays(4, (160,)), {})]
    quantised: Any = x, x[0], {"residual": residual, "smooth_scale": x[1], "eps": 1e-3, "weight_offset": 1.0}
    functions: list[Any] = [norms.add_rms_norm, norms.rms_norm, norms.quantised_rms_norm]

    def apart(problems: Any) -> Any:
        return [norm(x, weight=weight, **own) for norm, (x, weight, own) in zip(functions, problems, strict=True)]

    def program(made: Any) -> Any:
        gradient = jax.grad(lambda own: sum(jnp.sum(y**3) for y in jax.tree.leaves(made([*own, quantised])[:2])))
        return jax.jit(lambda own: (made([*own, quantised]), gradient(own)))(given)

    for found, wanted in zip(*map(jax.tree.leaves, map(program, (norms.rms_norms, apart))), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(np.float32(found), np.float32(wanted), rtol, atol)


def test_several_norms_at_once() -> None:
    check_several()


def check_quantised(norm: str, out_dtype: str, shape: tuple[int, int]) -> None:
    """Hold a quantised sum against the oracle."""
    x, residual = arrays(1, shape, "bfloat16", 2)
    # Of rows of zeros the scale is 1.
    x, residual = x.at[2].set(0), residual.at[2].set(0)
    weight, smooth = arrays(2, shape[-1:], "float32", 2)
    call: Callable[..., Any] = getattr(norms, f"quantised_{norm}_norm")
    made = call(x, weight, eps=1e-5, residual=residual, smooth_scale=smooth, out_dtype=out_dtype)
    oracle: Callable[..., Any] = {"layer": reference.layernorm2d_fwd, "rms": reference.rmsnorm2d_fwd}[norm]
    rows, vectors = [double(each).bfloat16() for each in (x, residual)], [*map(double, (weight, smooth))]
    words = {"fadd": "pre_add_store", "fquant": "smooth_dynamic", "out_dtype": getattr(torch, out_dtype)}
    expected = oracle(rows[0], vectors[0].float(), eps=1e-5, residual=rows[1], smooth_scale=vectors[1].float(), **words)
    assert (made.y.dtype.name, made.y_scale.dtype.name, made.y_scale.shape) == (out_dtype, "float32", shape[:1])
    assert made.y_scale[2] == 1
    close(made.residual_out, expected.residual_out, 0, 0)
    close(made.y_scale, expected.y_scale, 0, 1e-5)
    # One step, where the last bit of a sum decides.
    wanted = expected.y.float().numpy()
    steps = np.abs(np.asarray(made.y, np.float32) - wanted)
    assert (steps <= (1 if out_dtype == "int8" else 0.13 * np.abs(wanted))).all()
    assert (steps > 0).mean() < 0.01


QUANTISED = [("layer", "float8_e4m3fn"), ("rms", "int8"), ("rms", "float8_e4m3fnuz"), ("layer", "float8_e5m2")]


@pytest.mark.parametrize(
    ("norm", "out_dtype"), [pytest.param(*case, marks=[THOROUGH] * (case is not QUANTISED[0])) for case in QUANTISED]
)
def test_quantised(norm: str, out_dtype: str) -> None:
    check_quantised(norm, out_dtype, (5, 64))


@THOROUGH
def test_a_row_with_nan_leaves_the_others_alone() -> None:
    (x,) = arrays(1, (3, 16))
    made = norms.quantised_rms_norm(x.at[1, 3].set(jnp.nan))
    whole = norms.quantised_rms_norm(x)
    assert np.isnan(made.y_scale[1])
    assert (made.y[jnp.array([0, 2])] == whole.y[jnp.array([0, 2])]).all()


def test_no_rows() -> None:
    weight = jnp.ones(16)
    y, gradient = jax.value_and_grad(lambda w: norms.layer_norm(jnp.zeros((0, 16)), w).sum())(weight)
    assert (float(y), gradient.tolist()) == (0.0, [0.0] * 16)


def test_one_row_without_leading_dimensions() -> None:
    """Of the same array twice: a call takes no program of another eps."""
    (x,) = arrays(1, (16,))
    for eps in (1e-6, 1.0):
        close(norms.rms_norm(x, eps=eps), torch.nn.functional.rms_norm(double(x), (16,), eps=eps), 2e-5, 2e-5)


X = np.ones((2, 8), np.float32)
NO_FLAG: Any = "no"
ANGLES = np.ones((2, 4), np.float32)


def rope(**others: Any) -> Any:
    q = np.ones((3, 2, 1, 8), np.float32)
    return norms.qk_norm_rope(
        **{"q": q, "k": q, "q_weight": None, "k_weight": None, "cos": ANGLES, "sin": ANGLES} | others
    )


INT8 = {"out_dtype": "int8"}
REFUSED: dict[str, list[tuple[Any, str]]] = table_at(Path(__file__).with_name("refused.yaml"), globals())


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *row) for error, rows in REFUSED.items() for row in rows]
)
def test_what_is_wrong_is_said(error: str, call: Any, message: str) -> None:
    with pytest.raises(getattr(errors, error, TypeError), match=message):
        call()


@THOROUGH
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_promotion_may_be_forbidden(norm: str) -> None:
    """Where a program forbids ranks and dtypes to be promoted, these norms and their gradients go on."""

    def loss(x: Any, weight: Any) -> Any:
        return getattr(norms, f"{norm}_norm")(x, weight).astype("float32").sum()

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        check_gradients(norm, "before", "bfloat16", (3, 4, 48), ATOL["bfloat16"], ATOL["bfloat16"])
        check_quantised(norm, "int8", (5, 64))
        check_quantised(norm, "float8_e4m3fn", (5, 64))
        (x,), weight = arrays(1, (2, 3, 16), "bfloat16"), jnp.ones(16)
        jax.vmap(jax.grad(loss, (0, 1)), (0, None))(x, weight)
        norms.quantised_rms_norm(x, weight, scale_dtype="float16")


def by_hand(x: Any, weight: Any, bias: Any) -> Any:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * weight + bias


def near(actual: Any, expected: Any, atol: float = 1e-4) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=1e-4)


def of_cubes(norm: Any, at: tuple[int, ...] = (0, 1, 2)) -> Any:
    """Return a loss of a norm, and the loss's gradients."""
    return jax.value_and_grad(lambda *o: jnp.sum(norm(*o) ** 3), at)


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

    near(jax.vmap(norms.layer_norm, axes)(*operands), jax.vmap(by_hand, axes)(*operands))
    found, expected = (jax.jit(jax.vmap(of_cubes(norm), axes))(*operands) for norm in (norms.layer_norm, by_hand))
    near(found, expected, atol=2e-3)


@pytest.mark.parametrize("axes", [(0, None), pytest.param((2, 0), marks=THOROUGH)], ids=str)
def test_vmap_of_channels(axes: tuple[int, int | None]) -> None:
    """Over images, whose batch dimension may lie anywhere, and over weights."""
    (x,), (weight,) = arrays(1, (3, 2, 8, 3, 5)), arrays(2, (3, 8))
    operands = jnp.moveaxis(x, 0, axes[0]), weight if axes[1] == 0 else weight[0]

    def moved(x: Any, weight: Any) -> Any:
        return jnp.moveaxis(by_hand(jnp.moveaxis(x, 1, -1), weight, 0), -1, 1)

    over_channels = partial(norms.layer_norm, dim=1)
    found, expected = (jax.vmap(of_cubes(norm, (0, 1)), axes)(*operands) for norm in (over_channels, moved))
    near(found, expected, atol=2e-3)


@THOROUGH
@pytest.mark.parametrize("axes", [(0, 0, None, 0), (0, None, None, None), (0, 0, 0, 0)], ids=str)
def test_vmap_of_heads(axes: tuple[int | None, ...]) -> None:
    """Over tokens, with positions or without; over weights, one for each member."""
    every = [arrays(1, (3, 4, 2, 16))[0], arrays(2, (3, 4, 1, 16))[0], arrays(3, (3, 16))[0]]
    every.append(jnp.arange(36).reshape(3, 3, 4) % 9)
    (table,) = arrays(4, (9, 8))

    def gradients(q: Any, k: Any, weight: Any, positions: Any) -> Any:
        def loss(*own: Any) -> Any:
            options = {"positions": positions, "mrope_section": (4, 2, 2)}
            made: Any = norms.qk_norm_rope
            return sum(jnp.sum(each**3) for each in made(*own, weight, table, table, **options))

        return jax.grad(loss, (0, 1, 2))(q, k, weight)

    found = jax.vmap(gradients, axes)(*[each[0] if at is None else each for each, at in zip(every, axes, strict=True)])
    for at in range(3):
        alone = gradients(*[each[0 if axis is None else at] for each, axis in zip(every, axes, strict=True)])
        near([each[at] for each in found], alone, atol=2e-3)


def of_mapped(norm: Any) -> Any:
    """Weights' gradients are sums over the batch."""
    return of_cubes(jax.vmap(norm, (0, None, None)))


def of_gradients(norm: Any) -> Any:
    return jax.grad(lambda *o: sum(jnp.sum(g**2) for g in of_cubes(norm)(*o)[1]), (0, 1, 2))


@THOROUGH
@pytest.mark.parametrize(("of", "shape", "atol"), [(of_mapped, (5, 3, 24), 2e-3), (of_gradients, (3, 24), 0.5)])
def test_a_gradient_of_what_is_transformed(of: Callable[[Any], Any], shape: tuple[int, ...], atol: float) -> None:
    operands = *arrays(1, shape), *arrays(2, (24,), n=2)
    near(of(norms.layer_norm)(*operands), of(by_hand)(*operands), atol)


@THOROUGH
def test_vmap_of_quantised_rows_and_of_residuals_that_are_shared() -> None:
    x, residual = arrays(1, (3, 4, 24), n=2)
    made = jax.vmap(lambda x: norms.quantised_rms_norm(x, residual=residual[0]))(x)
    for at in range(3):
        alone = norms.quantised_rms_norm(x[at], residual=residual[0])
        assert all((one[at] == other).all() for one, other in zip(made, alone, strict=True))


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
    near(found, expected, atol=2e-2)

"""The operators: what torch checks of any, that they return what the functions do, and how graphs come to hold them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import normforge
from normforge import errors
from normforge.calls.functions import completed
from normforge.calls.outputs import LayerNormOutput, NormGradients
from normforge.calls.traced import INVARIANT
from proving.cases import Tensors, cases, check, operands

from ..calling import FORWARD, each_norm, same_bits
from ..calls.shared import BACKWARD, backward_operands
from ..thorough import THOROUGH
from . import registered

M, N = 3, 64

# Arguments of the forward functions, by name; vectors and rows are made anew for each test.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "saved": {"save_mv": True},
    "other type": {"out_dtype": torch.bfloat16},
    "x_bias": {"x_bias": "vector"},
    "cast first": {"out_dtype": torch.float16, "cast": "before_weight", "save_mv": True},
    "add": {"residual": "rows", "fadd": "pre_add"},
    "add and store": {"residual": "halves", "fadd": "pre_add_store", "save_mv": True},
    "int8": {"fquant": "dynamic", "rounding": "truncate", "save_mv": True},
    "smooth fp8": {
        "fquant": "smooth_dynamic",
        "smooth_scale": "vector",
        "out_dtype": torch.float8_e4m3fn,
        "scale_dtype": torch.float16,
        "residual": "rows",
        "fadd": "pre_add_store",
    },
    "dropout": {
        "residual": "rows",
        "fadd": "pre_add_store",
        "dropout_p": 0.25,
        "dropout_rng": "state",
        "x_bias": "vector",
        "save_mv": True,
    },
}
each_mode = pytest.mark.parametrize("modes", MODES.values(), ids=[name.replace(" ", "_") for name in MODES])

_SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: torch.randn(N),
    "rows": lambda: torch.randn(M, N),
    "halves": lambda: torch.randn(M, N).half(),
    "state": lambda: torch.tensor([3, 4]),
}


def made(modes: dict[str, Any]) -> dict[str, Any]:
    return {name: _SHAPES[value]() if value in _SHAPES else value for name, value in modes.items()}


def arguments(norm: str, modes: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a forward operator, from those of the function."""
    given = {"x": torch.randn(M, N), "weight": torch.randn(N), "bias": torch.randn(N), "eps": 1e-5, **modes}
    return passed(registered.FORWARD[norm], f"{norm}norm2d_fwd", {"weight_offset": 1.0, **given})


def gradient_arguments(norm: str, **others: Any) -> tuple[Any, ...]:
    """The arguments of a backward operator, where every tensor is there that may be."""
    given = backward_operands(norm, M, N) | {"weight": torch.randn(N).bfloat16(), "x_bias": None, "dresidual_out": None}
    given |= {"wants": ["dx", "dweight", "dbias"] if norm == "layer" else ["dx", "dweight"], "cast": "before_weight"}
    return passed(registered.BACKWARD[norm], f"{norm}norm2d_bwd", {"weight_offset": 1.0, **given, **others})


def passed(operator: Any, function: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of an operator, in the order of its schema."""
    given = completed(function, given)
    return tuple(given.get(argument.name) for argument in operator._schema.arguments)


# Modes whose gradients torch checks as well.
DIFFERENTIATED = ("saved", "add and store", "cast first", "dropout")
CHECKED = [*((name, False) for name in MODES), *((name, True) for name in DIFFERENTIATED)]


@THOROUGH
@pytest.mark.parametrize(("name", "grad"), CHECKED)
@each_norm
def test_torchs_checks_of_a_forward_operator(norm: str, name: str, grad: bool) -> None:
    values = arguments(norm, made(MODES[name]))
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_(grad)
    torch.library.opcheck(registered.FORWARD[norm], values)


@pytest.mark.parametrize("modes", [MODES["plain"], MODES["int8"], MODES["add and store"]], ids=["plain", "int8", "add"])
@each_norm
def test_torchs_checks_of_an_operator_that_writes(norm: str, modes: dict[str, Any]) -> None:
    given = made(modes)
    out = torch.empty(M, N, dtype=torch.int8 if "fquant" in given else torch.float32)
    residual_out = torch.empty_like(given["residual"]) if "residual" in given else None
    torch.library.opcheck(registered.FORWARD_INTO[norm], (*arguments(norm, given), out, residual_out))


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"dresidual_out": torch.ones(M, N), "dx_dtype": torch.float16, "wants": ["dx"]},
        {"dy": None, "x_bias": torch.ones(N).half(), "dresidual_out": torch.ones(M, N), "wants": ["dx_bias", "dx"]},
        {"weight": None, "weight_offset": 0.0, "wants": ["dx"]},
        {"dropout_p": 0.25, "dropout_rng": torch.tensor([3, 4]), "wants": ["dx", "ddropped"]},
    ],
    ids=["all", "residual", "x_bias", "unweighted", "dropout"],
)
@each_norm
def test_torchs_checks_of_a_backward_operator(norm: str, others: dict[str, Any]) -> None:
    torch.library.opcheck(registered.BACKWARD[norm], gradient_arguments(norm, **others))


@each_mode
@each_norm
def test_a_traced_call_returns_what_an_eager_one_does(norm: str, modes: dict[str, Any]) -> None:
    given = {name: value.expand(2, M, N).clone() if _is_rows(value) else value for name, value in made(modes).items()}

    def call(x: torch.Tensor, weight: torch.Tensor) -> LayerNormOutput:
        return FORWARD[norm](x, weight, **given)

    graph = make_fx(call)(torch.randn(2, M, N), torch.randn(N))
    assert any(node.target is registered.FORWARD[norm] for node in graph.graph.nodes)
    fresh = torch.randn(2, M, N), torch.randn(N)
    actual, expected = graph(*fresh), call(*fresh)
    assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))
    strides = [[None if tensor is None else tensor.stride() for tensor in outputs] for outputs in (actual, expected)]
    assert strides[0] == strides[1]


def _is_rows(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (M, N)


@each_norm
def test_a_traced_gradient_is_what_an_eager_one_is(norm: str) -> None:
    given = registered.by_name(registered.BACKWARD[norm], gradient_arguments(norm))
    dy, x = given.pop("dy"), given.pop("x")
    for unused in ("bias_dtype", "dx_dtype", "x_bias", "dresidual_out"):
        given.pop(unused, None)
    # In another order than they are returned in, and any collection will do.
    given["wants"] = set(given["wants"])

    def call(dy: torch.Tensor, x: torch.Tensor) -> NormGradients:
        return BACKWARD[norm](dy, x, **given)

    graph = make_fx(call)(dy, x)
    assert any(node.target is registered.BACKWARD[norm] for node in graph.graph.nodes)
    assert all(same_bits(a, b) for a, b in zip(graph(dy, x), call(dy, x), strict=True))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.empty(M, N, dtype=torch.bfloat16)
        out = normforge.layernorm2d_fwd(x, residual=x, fadd=1, fquant=2, save_mv=True)
        with pytest.raises(errors.ShapeError, match=r"^weight has shape \(5,\); it takes \(64,\)"):
            normforge.rmsnorm2d_fwd(x, torch.empty(5))
        with pytest.raises(errors.ShapeError, match=r"^out has shape \(2, 64\); it takes x's, \(3, 64\)"):
            normforge.rmsnorm2d_fwd(x, out=torch.empty(2, N, dtype=torch.bfloat16))
    assert (out.y.dtype, out.y.shape) == (torch.int8, (M, N))
    assert out.residual_out is not None
    assert out.residual_out.dtype == torch.bfloat16
    assert all(rows is not None and rows.shape == (M,) for rows in (out.y_scale, out.mean, out.rstd))
    # Outside its mode too, a fake tensor is one.
    assert normforge.layer_norm(x, (N,)).shape == (M, N)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
@each_norm
def test_gradients_of_an_operator(norm: str, residual: torch.dtype | None, at_once: bool) -> None:
    """Called as any operator is, and as Inductor's code calls it."""
    operator: Any = registered.FORWARD[norm]
    call = operator.at_once if at_once else operator
    without = ("residual",) if residual is None else ()
    offset = 1.0 if norm == "rms" else 0.0
    (case,) = cases("plain", vary=(), norm=norm, shape=(M, N), without=without, residual=residual, weight_offset=offset)
    given = operands(case)
    if "bias" in given:
        given["bias"] = given["bias"].detach().half().requires_grad_()
    fadd = "pre_add_store" if "residual" in given else "none"

    def run(given: Tensors) -> tuple[torch.Tensor, ...]:
        made = call(*arguments(norm, {**given, "fadd": fadd, "save_mv": True}))
        return tuple(made[: 1 + ("residual" in given)])

    check(case, given, run=run)


def test_a_gradient_of_x_bias_is_summed_before_it_is_rounded() -> None:
    x, x_bias, residual = torch.randn(500, N).bfloat16(), torch.zeros(N), torch.randn(500, N)
    for tensor in (x, x_bias):
        tensor.requires_grad_()
    given = {"x": x, "x_bias": x_bias, "residual": residual, "fadd": "pre_add_store", "save_mv": True}
    y, *_ = registered.FORWARD["layer"](*arguments("layer", {**given, "weight": None, "bias": None}))
    dy = torch.randn(500, N).bfloat16()
    dx, dx_bias = torch.autograd.grad(y, (x, x_bias), dy)
    assert dx.dtype == torch.bfloat16
    exact = (x.detach().double() + residual.double()).requires_grad_()
    (wanted,) = torch.autograd.grad(torch.nn.functional.layer_norm(exact, (N,)), exact, dy.double())
    torch.testing.assert_close(dx_bias.double(), wanted.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({}, "mean and rstd were not saved; pass save_mv=True"),
        ({"fadd": "pre_add", "residual": "rows", "save_mv": True}, "fadd 'pre_add' does not store the sum"),
    ],
    ids=["unsaved", "sum not stored"],
)
@each_norm
def test_what_kept_too_little_has_no_gradient(norm: str, modes: dict[str, Any], message: str) -> None:
    x = torch.randn(M, N, requires_grad=True)
    y, *_ = registered.FORWARD[norm](*arguments(norm, {**made(modes), "x": x}))
    with pytest.raises(errors.GradientError, match=message):
        torch.autograd.grad(y.sum(), x)


@each_norm
def test_a_quantised_operator_has_no_gradient(norm: str) -> None:
    x = torch.randn(M, N, requires_grad=True)
    with pytest.raises(errors.GradientError, match="requires a gradient and a quantised output has none"):
        registered.FORWARD[norm](*arguments(norm, {"x": x, "fquant": "dynamic"}))


def test_saved_programs_hold_these_schemas() -> None:
    """Every operator has the schema in the file, to the character, and its batch-invariant twin has the same schema."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("normforge::")]
    schemas = {str(getattr(torch.ops.normforge, name.removeprefix("normforge::")).default._schema) for name in names}
    held = (Path(__file__).parent / "schemas.txt").read_text().splitlines()
    assert schemas == {schema.replace("(", f"{ending}(", 1) for schema in held for ending in ("", INVARIANT)}

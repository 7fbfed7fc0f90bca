"""weight_offset, x_bias and cast of the functional API: outputs and gradients against fp64, however a call is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.experimental.proxy_tensor

import normforge
from normforge import errors

from .oracle import FUNCTIONS, close, coarser, each_device, each_function

make_fx: Any = torch.fx.experimental.proxy_tensor.make_fx

M, N, EPS = 3, 96, 1e-5

# Of QuACK's backward pass, as `oracle` has them.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}

Tensors = dict[str, torch.Tensor]


def tensors(norm: str, dtype: torch.dtype, device: str = "cpu", shape: tuple[int, ...] = (M, N)) -> Tensors:
    """Every tensor that a function takes, each a leaf; weight and x_bias are of other types than x."""
    made = {"x": torch.randn(shape) + 0.3, "weight": torch.randn(N), "x_bias": torch.randn(N)}
    if norm.startswith("add"):
        made["residual"] = torch.randn(shape)
    if norm.endswith("layer"):
        made["bias"] = torch.randn(N)
    types = {"x": dtype, "residual": dtype, "x_bias": torch.bfloat16 if dtype is torch.float32 else torch.float32}
    return {name: tensor.to(device, types.get(name, torch.float32)).requires_grad_() for name, tensor in made.items()}


def call(norm: str, given: Tensors, **options: Any) -> tuple[torch.Tensor, ...]:
    rest = {} if norm.startswith("add") else {"normalized_shape": (N,)}
    made: Any = FUNCTIONS[norm](**given, **rest, eps=EPS, **options)
    return made if isinstance(made, tuple) else (made,)


def exact(norm: str, given: Tensors, weight_offset: float) -> tuple[Tensors, tuple[torch.Tensor, ...]]:
    """fp64 copies, and the formulas of them."""
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    total = wide["x"]
    for name in ("x_bias", "residual"):
        total = total + wide.get(name, 0.0)
    centred = total - total.mean(-1, keepdim=True) if norm.endswith("layer") else total
    h = centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = h * (wide["weight"] + weight_offset) if "weight" in wide else h
    y = y + wide.get("bias", 0.0)
    return wide, (y, total) if norm.startswith("add") else (y,)


def check(norm: str, given: Tensors, actual: tuple[torch.Tensor, ...], weight_offset: float) -> None:
    """Outputs, and gradients through all of them, of every tensor."""
    wide, wanted = exact(norm, given, weight_offset)
    dtype = given["x"].dtype
    for output, expected in zip(actual, wanted, strict=True):
        assert output.dtype is given["x"].dtype
        close("output", output, expected, TOLERANCES[dtype])
    arriving = [torch.randn_like(output) for output in actual]
    names = [name for name, tensor in given.items() if tensor.requires_grad]
    gradients = torch.autograd.grad(actual, [given[name] for name in names], arriving)
    expected_gradients = torch.autograd.grad(wanted, [wide[name] for name in names], [dy.double() for dy in arriving])
    for name, gradient, expected in zip(names, gradients, expected_gradients, strict=True):
        assert (gradient.dtype, gradient.shape) == (given[name].dtype, given[name].shape)
        close(f"gradient of {name}", gradient, expected, TOLERANCES[coarser(dtype, gradient.dtype)])


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_function
def test_an_offset_and_a_bias_of_x(norm: str, dtype: torch.dtype, device: str) -> None:
    for _ in range(2):
        # The second is known, and of other tensors.
        given = tensors(norm, dtype, device)
        check(norm, given, call(norm, given, weight_offset=1.0), 1.0)
    # The offset is a number of each call.
    check(norm, given, call(norm, given, weight_offset=-0.5), -0.5)
    check(norm, given, call(norm, given), 0.0)


@each_function
def test_what_requires_no_gradient_changes_nothing_else(norm: str) -> None:
    for name in tensors(norm, torch.float32):
        given = tensors(norm, torch.float32)
        for other in given.values():
            other.requires_grad_(other is given[name])
        y, *_ = actual = call(norm, given, weight_offset=1.0)
        wide, (wanted, *_) = exact(norm, given, 1.0)
        dy = torch.randn_like(y)
        (gradient,) = torch.autograd.grad(y, [given[name]], dy)
        (expected,) = torch.autograd.grad(wanted, [wide[name]], dy.double())
        close(name, gradient, expected, TOLERANCES[gradient.dtype])
        assert all(total.requires_grad == (name in ("x", "residual", "x_bias")) for total in actual[1:])
        with torch.no_grad():
            assert torch.equal(call(norm, given, weight_offset=1.0)[0], y)


@pytest.mark.parametrize("arrives", ["y", "residual_out"])
@pytest.mark.parametrize("norm", ["add_layer", "add_rms"])
def test_the_gradient_of_x_bias_through_either_output(norm: str, arrives: str) -> None:
    given = tensors(norm, torch.float32)
    place = ("y", "residual_out").index(arrives)
    output, wanted = call(norm, given)[place], exact(norm, given, 0.0)
    dy = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, [given["x_bias"]], dy)
    (expected,) = torch.autograd.grad(wanted[1][place], [wanted[0]["x_bias"]], dy.double())
    assert gradient.dtype is torch.bfloat16
    close("x_bias", gradient, expected, 2e-2)


@pytest.mark.parametrize("norm", ["add_layer", "add_rms"])
def test_the_gradient_of_x_bias_is_summed_before_it_is_rounded(norm: str) -> None:
    """In bf16 a sum of 64 rounded gradients would be off by more."""
    given = tensors(norm, torch.bfloat16, shape=(64, N))
    outputs, (wide, wanted) = call(norm, given), exact(norm, given, 0.0)
    # Of the sum as it is stored, so that it alone decides.
    dy = torch.zeros_like(outputs[0])
    dresidual_out = torch.full_like(outputs[1], 1 + 2**-7)
    (gradient,) = torch.autograd.grad(outputs, [given["x_bias"]], (dy, dresidual_out))
    (expected,) = torch.autograd.grad(wanted, [wide["x_bias"]], (dy.double(), dresidual_out.double()))
    assert torch.equal(gradient, expected.float())


@each_function
def test_the_bias_of_x_may_be_another_operand_too(norm: str) -> None:
    """One tensor in several places gets the sum of their gradients."""
    given = tensors(norm, torch.float32)
    given["x_bias"] = given["weight"]
    for _ in range(2):
        y, *_ = call(norm, given)
        dy = torch.randn_like(y)
        (gradient,) = torch.autograd.grad(y, [given["weight"]], dy)
        wide, (wanted, *_) = exact(norm, given, 0.0)
        parts = torch.autograd.grad(wanted, [wide["weight"], wide["x_bias"]], dy.double())
        close("both", gradient, parts[0] + parts[1], 1e-4)


@each_function
def test_changing_the_bias_of_x_before_the_backward_pass_is_noticed_where_it_is_kept(norm: str) -> None:
    given = tensors(norm, torch.float32)
    x_bias = given["x_bias"] * 1
    y, *_ = call(norm, {**given, "x_bias": x_bias})
    x_bias.data.add_(0)
    with torch.no_grad():
        x_bias.add_(1)
    if norm.startswith("add"):
        # The sum is kept instead.
        torch.autograd.grad(y.sum(), given["x_bias"])
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), given["x_bias"])


@pytest.mark.filterwarnings("ignore:Input .* not a double precision")
@each_function
def test_gradcheck(norm: str) -> None:
    names, values = zip(*tensors(norm, torch.float32).items(), strict=True)

    def function(*changed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(norm, dict(zip(names, changed, strict=True)), weight_offset=0.5)

    values = tuple(value.detach().float().requires_grad_() for value in values)
    assert torch.autograd.gradcheck(function, values, eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0.0, fast_mode=True)


@pytest.mark.parametrize("graph", ["aot_eager", "export", "make_fx"])
@each_function
def test_a_traced_call_is_the_same(norm: str, graph: str) -> None:
    given = tensors(norm, torch.float32)
    expected = call(norm, given, weight_offset=1.0)

    class Module(torch.nn.Module):
        def forward(self, given: Tensors) -> tuple[torch.Tensor, ...]:
            return call(norm, given, weight_offset=1.0)

    if graph == "aot_eager":
        compiled: Callable[..., Any] = torch.compile(Module(), backend="aot_eager", fullgraph=True)
        check(norm, given, compiled(given), 1.0)
        return
    if graph == "export":
        with torch.no_grad():
            traced: Any = torch.export.export(Module(), (given,)).module()
    else:
        traced = make_fx(lambda given: call(norm, given, weight_offset=1.0))(given)
    for output, wanted in zip(traced(given), expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cast", ["after_weight", "before_weight"])
@pytest.mark.parametrize("how", ["float64", "vmap", "meta-free"])
@each_function
def test_torchs_operators_compute_the_same(norm: str, how: str, cast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if cast == "before_weight" else torch.float32
    given = {name: tensor.detach() for name, tensor in tensors(norm, dtype).items()}
    expected = call(norm, given, weight_offset=1.0, cast=cast)
    if how == "float64":
        actual = call(norm, {**given, "x_bias": given["x_bias"].double()}, weight_offset=1.0, cast=cast)
    elif how == "vmap":

        def one(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return call(norm, {**given, "x": x}, weight_offset=1.0, cast=cast)

        others = {name: tensor[0] if name == "residual" else tensor for name, tensor in given.items()}
        if "residual" in given:
            pairs = torch.func.vmap(
                lambda x, residual: call(norm, {**others, "x": x, "residual": residual}, weight_offset=1.0, cast=cast)
            )
            actual = pairs(given["x"], given["residual"])
        else:
            actual = torch.func.vmap(one)(given["x"])
    else:
        monkeypatch.delenv("TRITON_INTERPRET")
        assert normforge.backend(given["x"]) == "torch"
        actual = call(norm, given, weight_offset=1.0, cast=cast)
    for output, wanted in zip(actual, expected, strict=True):
        assert output.dtype is wanted.dtype
        close("output", output, wanted.double(), 1e-5 if dtype is torch.float32 else 1.6e-2)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no number": ({"weight_offset": "one"}, errors.ConflictError, "weight_offset='one' will not do"),
    "True": ({"weight_offset": True}, errors.ConflictError, "weight_offset=True will not do"),
    "None": ({"weight_offset": None}, errors.ConflictError, "weight_offset=None will not do"),
    "infinite": ({"weight_offset": float("inf")}, errors.ConflictError, "weight_offset=inf will not do"),
    "no weight": ({"weight": None, "weight_offset": 1.0}, errors.ConflictError, "weight_offset=1.0 is added to weight"),
    "short": ({"x_bias": torch.ones(5)}, errors.ShapeError, r"x_bias has shape \(5,\); it takes \(96,\)"),
    "integer": ({"x_bias": torch.ones(N).int()}, errors.DTypeError, "x_bias has dtype torch.int32"),
    "elsewhere": ({"x_bias": torch.ones(N, device="meta")}, errors.DeviceError, "x_bias is on meta"),
    "integer weight": (
        {"weight": torch.ones(N).int(), "weight_offset": 1.0},
        errors.DTypeError,
        "weight has dtype torch.int32",
    ),
    "cast": ({"cast": "never"}, errors.ConflictError, "cast='never' is no mode"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
@each_function
def test_bad_options(norm: str, case: tuple[dict[str, Any], type[Exception], str]) -> None:
    """Also after good calls like it."""
    bad, error, says = case
    given = {name: tensor.detach() for name, tensor in tensors(norm, torch.float32).items()}
    for _ in range(2):
        with pytest.raises(error, match=says):
            call(
                norm,
                {**given, **{k: v for k, v in bad.items() if k in ("x_bias", "weight")}},
                **{k: v for k, v in bad.items() if k not in ("x_bias", "weight")},
            )
        call(norm, {name: tensor for name, tensor in given.items() if bad.get(name, tensor) is not None})

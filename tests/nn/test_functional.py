"""The functional API: gradients against fp64 autograd, and everything else torch's functions promise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import normforge
from normforge.selection import dispatch

from ..calling import FLOATS, each_device, each_float
from .oracle import Operands, backward, call, check, each_add, each_function, each_norm, operands

# Every pipeline's lengths but the longest, ragged and not.
SHAPES = [(5, 1), (3, 13), (2, 2, 100), (7, 1024), (3, 1500), (2, 4099)]

TORCH: dict[str, Callable[..., torch.Tensor]] = {"layer": functional.layer_norm, "rms": functional.rms_norm}
OURS: dict[str, Callable[..., torch.Tensor]] = {"layer": normforge.layer_norm, "rms": normforge.rms_norm}


@each_device
@each_float
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_function
def test_gradients(norm: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    # LayerNorm of one element is constant; of a sum that was rounded to be stored, its gradient is all rounding error.
    residual = torch.float32 if shape[-1] == 1 else dtype
    given = operands(norm, shape, dtype, device=device, residual=residual)
    assert normforge.backend(given.x) == "kernel"
    dy = torch.randn(shape, device=device, dtype=dtype)
    dresidual_out = torch.randn(shape, device=device, dtype=residual) if given.residual is not None else None
    check(norm, given, dy=dy, dresidual_out=dresidual_out)


@each_device
@each_norm
def test_gradients_of_a_long_row(norm: str, device: str) -> None:
    given = operands(norm, (1, 20000), torch.bfloat16, device=device)
    check(norm, given, dy=torch.randn(1, 20000, device=device, dtype=torch.bfloat16))


@each_device
@pytest.mark.parametrize("weight", [*FLOATS, None], ids=str)
@pytest.mark.parametrize("bias", [*FLOATS, None], ids=str)
@each_float
def test_weight_and_bias_of_any_type_or_none(
    dtype: torch.dtype, bias: torch.dtype | None, weight: torch.dtype | None, device: str
) -> None:
    given = operands("layer", (3, 130), dtype, device=device, weight=weight, bias=bias)
    check("layer", given, dy=torch.randn(3, 130, device=device, dtype=dtype))


@each_device
@pytest.mark.parametrize("residual", FLOATS, ids=str)
@pytest.mark.parametrize("arrives", ["y", "residual_out", "both"])
@each_float
@each_add
def test_gradients_through_either_output_or_both(
    norm: str, dtype: torch.dtype, arrives: str, residual: torch.dtype, device: str
) -> None:
    given = operands(norm, (3, 130), dtype, device=device, residual=residual)
    check(
        norm,
        given,
        dy=torch.randn(3, 130, device=device, dtype=dtype) if arrives != "residual_out" else None,
        dresidual_out=torch.randn(3, 130, device=device, dtype=residual) if arrives != "y" else None,
    )


@each_device
@pytest.mark.parametrize(("dtype", "residual"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@each_add
def test_each_gradient_is_rounded_once(norm: str, dtype: torch.dtype, residual: torch.dtype, device: str) -> None:
    """The one in 16 bits is the other one rounded, and that one has not been."""
    given = operands(norm, (3, 130), dtype, device=device, residual=residual)
    assert given.residual is not None
    y, residual_out = call(norm, given)
    assert residual_out is not None
    gradients = torch.randn_like(y), torch.randn_like(residual_out)
    dx, dresidual = torch.autograd.grad((y, residual_out), (given.x, given.residual), gradients)
    wide, narrow = (dresidual, dx) if residual is torch.float32 else (dx, dresidual)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.bfloat16(), narrow)
    assert not torch.equal(wide, narrow.float())


@each_device
@pytest.mark.parametrize("asked", ["x", "weight", "bias", "residual"])
@each_function
def test_only_what_requires_a_gradient_gets_one(norm: str, asked: str, device: str) -> None:
    given = operands(norm, (3, 130), torch.float32, device=device)
    if asked not in given.present():
        asked = "x"
    for name, tensor in given.present().items():
        tensor.requires_grad_(name == asked)
    dresidual_out = (
        torch.randn(3, 130, device=device) if asked in ("x", "residual") and given.residual is not None else None
    )
    check(norm, given, dy=torch.randn(3, 130, device=device), dresidual_out=dresidual_out)


@each_device
@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 3, 5, 7)], ids=str)
@each_norm
def test_several_normalised_dimensions(norm: str, shape: tuple[int, ...], device: str) -> None:
    given = operands(norm, shape, torch.float32, device=device, normalized=2)
    check(norm, given, normalized=2, dy=torch.randn(shape, device=device))


@each_device
@each_norm
def test_all_dimensions_normalised(norm: str, device: str) -> None:
    given = operands(norm, (3, 5), torch.float32, device=device, normalized=2)
    check(norm, given, normalized=2, dy=torch.randn(3, 5, device=device))


@each_norm
@pytest.mark.parametrize("weighted", [False, True])
@each_float
def test_torchs_own_call_and_defaults(norm: str, weighted: bool, dtype: torch.dtype) -> None:
    # So small that eps decides the result.
    x = (torch.randn(3, 40) * 1e-3).to(dtype)
    arguments = {"weight": torch.randn(40).to(dtype)} if weighted else {}
    wanted = TORCH[norm](x, [40], **arguments)
    # The second call is one that is known.
    for _ in range(2):
        torch.testing.assert_close(OURS[norm](x, [40], **arguments), wanted)


@each_norm
def test_signatures_are_torchs(norm: str) -> None:
    every = inspect.signature(OURS[norm]).parameters.values()
    ours = [p for p in every if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in every if p not in ours] == ["cast", "weight_offset", "x_bias"]
    theirs = list(inspect.signature(TORCH[norm]).parameters.values())
    # torch calls its first one `input`.
    assert [p.name for p in ours[1:]] == [p.name for p in theirs[1:]]
    assert [p.default for p in ours] == [p.default for p in theirs]


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "permuted planes": lambda x: x.transpose(0, 1),
    "every other column": lambda x: x[..., ::2],
    "some rows of each plane": lambda x: x[:, 1:],
    "a slice of wider rows": lambda x: x[..., 3:60],
    "one row repeated": lambda x: x[:1, :1].expand(4, 5, 64),
}


@each_device
@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
@each_function
def test_any_strides(norm: str, view: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    x = view(torch.randn(4, 5, 64, device=device)).detach().requires_grad_()
    given = operands(norm, x.shape, torch.float32, device=device)
    given.x = x
    if given.residual is not None:
        given.residual = view(torch.randn(4, 5, 64, device=device)).detach().requires_grad_()
    dy = view(torch.randn(4, 5, 64, device=device))
    check(norm, given, dy=dy, dresidual_out=None if given.residual is None else dy)


@each_device
@each_function
def test_a_sum(norm: str, device: str) -> None:
    """`.sum()` sends back one element, expanded over everything."""
    given = operands(norm, (2, 32, 256), torch.bfloat16, device=device)
    ones = torch.ones((), device=device, dtype=torch.bfloat16).expand(2, 32, 256)
    check(norm, given, dy=ones, dresidual_out=None if given.residual is None else ones)


@each_device
@each_norm
def test_a_gradient_of_another_type(norm: str, device: str) -> None:
    given = operands(norm, (3, 130), torch.float32, device=device)
    check(norm, given, dy=torch.randn(3, 130, device=device, dtype=torch.bfloat16))


@each_device
@each_function
def test_strided_weights(norm: str, device: str) -> None:
    given = operands(norm, (3, 64), torch.float32, device=device)
    wide = torch.randn(128, device=device, requires_grad=True)
    given.weight = wide[::2]
    y, _ = call(norm, given)
    backward(y.sum())
    contiguous = operands(norm, (3, 64), torch.float32, device=device)
    contiguous = Operands(given.x, given.residual, wide[::2].detach().contiguous().requires_grad_(), given.bias)
    backward(call(norm, contiguous)[0].sum())
    assert wide.grad is not None
    assert contiguous.weight is not None
    assert contiguous.weight.grad is not None
    assert torch.equal(wide.grad[::2], contiguous.weight.grad)
    assert not wide.grad[1::2].any()


@each_device
@each_function
def test_the_callers_gradient_is_not_written(norm: str, device: str) -> None:
    given = operands(norm, (3, 130), torch.float32, device=device)
    outputs = [output for output in call(norm, given) if output is not None]
    gradients = [torch.randn(3, 130, device=device) for _ in outputs]
    before = [gradient.clone() for gradient in gradients]
    torch.autograd.backward(outputs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))


@each_device
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)], ids=str)
@each_function
def test_no_rows(norm: str, shape: tuple[int, ...], device: str) -> None:
    given = operands(norm, shape, torch.bfloat16, device=device)
    y, residual_out = call(norm, given)
    assert y.shape == shape
    assert residual_out is None or residual_out.shape == shape
    backward(y.sum())
    for name, tensor in given.present().items():
        assert tensor.grad is not None, name
        assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)
        assert not tensor.grad.any()


@each_device
@each_function
def test_two_runs_give_the_same_bits(norm: str, device: str) -> None:
    given = operands(norm, (37, 1000), torch.bfloat16, device=device)
    dy = torch.randn(37, 1000, device=device, dtype=torch.bfloat16)
    runs = [torch.autograd.grad(call(norm, given)[0], list(given.present().values()), dy) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:Input .* not a double precision")
@pytest.mark.parametrize("n", [1, 5, 300])
@each_function
def test_gradcheck(norm: str, n: int) -> None:
    """Finite differences of the kernels themselves, with steps and tolerances that fp32 can bear."""
    given = operands(norm, (2, n), torch.float32)
    names, tensors = zip(*given.present().items(), strict=True)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = call(norm, Operands(**dict(zip(names, values, strict=True))), eps=0.1)
        return tuple(output for output in outputs if output is not None)

    # fast_mode compares one random projection instead of every element's column.
    assert torch.autograd.gradcheck(function, tensors, eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0.0, fast_mode=n > 5)


def test_a_graph_of_gradients_may_be_asked_for_and_not_used() -> None:
    given = operands("layer", (3, 64), torch.float32)
    plain = torch.autograd.grad(call("layer", given)[0].square().sum(), given.x)
    graph = torch.autograd.grad(call("layer", given)[0].square().sum(), given.x, create_graph=True)
    assert torch.equal(plain[0], graph[0])


@each_norm
def test_changing_x_before_the_backward_pass_is_noticed(norm: str) -> None:
    given = operands(norm, (3, 64), torch.float32)
    x = given.x * 1
    y = OURS[norm](x, (64,))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(y.sum())


@each_device
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@each_float
@each_norm
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_as_torch(norm: str, dtype: torch.dtype, autocast: torch.dtype, device: str) -> None:
    x = (torch.randn(3, 64, device=device) * 1e-2).to(dtype).requires_grad_()
    weight = torch.randn(64, device=device, requires_grad=True)
    twin, twin_weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    with torch.autocast(device, dtype=autocast):
        actual = OURS[norm](x, (64,), weight)
        wanted = TORCH[norm](twin, (64,), twin_weight)
    torch.testing.assert_close(actual, wanted)
    dy = torch.randn_like(wanted)
    backward(actual, dy)
    backward(wanted, dy)
    torch.testing.assert_close(x.grad, twin.grad)
    tolerance = 3e-2 if wanted.dtype != torch.float32 else 1e-4
    torch.testing.assert_close(weight.grad, twin_weight.grad, rtol=tolerance, atol=tolerance)


X = torch.zeros(2, 3, 64)
VECTOR = torch.ones(64)

BAD: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str, tuple[str, ...]]] = {
    "integer x": ("layer", (X.int(), (64,)), {}, "DTypeError", ("x has dtype torch.int32", "torch.bfloat16")),
    "no tensor": ("layer", ([1.0], (64,)), {}, "DTypeError", ("x is a list", "torch.Tensor")),
    "sparse x": ("layer", (X.to_sparse(), (64,)), {}, "LayoutError", ("x is in layout torch.sparse_coo",)),
    "wrong length": ("layer", (X, (32,)), {}, "ShapeError", ("normalized_shape is (32,)", "(2, 3, 64)")),
    "wrong dimensions": ("rms", (X, (2, 64)), {}, "ShapeError", ("normalized_shape is (2, 64)", "(2, 3, 64)")),
    "too many dimensions": ("rms", (VECTOR, (1, 64)), {}, "ShapeError", ("normalized_shape is (1, 64)", "(64,)")),
    "no dimensions": ("layer", (X, ()), {}, "ShapeError", ("normalized_shape is ()", "one or more")),
    "a number of dimensions": ("layer", (X, 64), {}, "DTypeError", ("normalized_shape is 64", "tuple of integers")),
    "float dimensions": ("rms", (X, (64.0,)), {}, "DTypeError", ("normalized_shape is (64.0,)", "tuple of integers")),
    "weight too short": ("layer", (X, (64,), VECTOR[:5]), {}, "ShapeError", ("weight has shape (5,)", "(64,)")),
    "weight too flat": ("rms", (X, (3, 64), VECTOR), {}, "ShapeError", ("weight has shape (64,)", "(3, 64)")),
    "bias too long": ("layer", (X, (64,)), {"bias": torch.ones(65)}, "ShapeError", ("bias has shape (65,)", "(64,)")),
    "integer weight": ("rms", (X, (64,), VECTOR.int()), {}, "DTypeError", ("weight has dtype torch.int32",)),
    "weight elsewhere": ("rms", (X, (64,), VECTOR.to("meta")), {}, "DeviceError", ("weight is on meta", "x on cpu")),
    "eps negative": ("layer", (X, (64,)), {"eps": -1.0}, "ConflictError", ("eps=-1.0", "at least 0")),
    "eps no number": ("rms", (X, (64,)), {"eps": "small"}, "ConflictError", ("eps='small'", "a number")),
    "eps None": ("layer", (X, (64,)), {"eps": None}, "ConflictError", ("eps=None", "a number")),
    "residual of another shape": (
        "add_layer",
        (X, X[0]),
        {},
        "ShapeError",
        ("residual has shape (3, 64)", "x's shape"),
    ),
    "residual None": ("add_rms", (X, None), {}, "DTypeError", ("residual is a NoneType", "torch.Tensor")),
    "integer residual": ("add_rms", (X, X.long()), {}, "DTypeError", ("residual has dtype torch.int64",)),
    "residual elsewhere": ("add_layer", (X, X.to("meta")), {}, "DeviceError", ("residual is on meta", "x on cpu")),
    "added weight too short": ("add_rms", (X, X, VECTOR[:5]), {}, "ShapeError", ("weight has shape (5,)", "(64,)")),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("case", BAD.values(), ids=[name.replace(" ", "_") for name in BAD])
def test_bad_arguments(case: tuple[str, tuple[Any, ...], dict[str, Any], str, tuple[str, ...]], grad: bool) -> None:
    """Before any call, and after good ones like it, when nothing is checked that was checked before."""
    norm, arguments, keywords, error, says = case
    functions: dict[str, Callable[..., object]] = {
        "layer": normforge.layer_norm,
        "rms": normforge.rms_norm,
        "add_layer": normforge.add_layer_norm,
        "add_rms": normforge.add_rms_norm,
    }
    good = X.clone().requires_grad_(grad)
    messages = []
    for _ in range(3):
        with pytest.raises(getattr(normforge.errors, error)) as raised:
            functions[norm](*arguments, **keywords)
        messages.append(str(raised.value))
        for weight in (VECTOR, None):
            if norm.startswith("add"):
                functions[norm](good, X, weight)
            else:
                functions[norm](good, (64,), weight)
    assert len(set(messages)) == 1
    for words in says:
        assert words in messages[0]


@pytest.mark.parametrize("asking", [("weight",), ("bias",), ("x",), ("residual",), ("residual", "weight"), ()], ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_the_sum_has_a_gradient_where_what_is_summed_has(asking: tuple[str, ...], traced: bool) -> None:
    def add(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return normforge.add_layer_norm(x, residual, weight, bias)

    given = {"x": X.clone(), "residual": X.clone(), "weight": VECTOR.clone(), "bias": VECTOR.clone()}
    for name in asking:
        given[name].requires_grad_()
    function = torch.compile(add, backend="aot_eager", fullgraph=True) if traced else add
    for _ in range(2):
        y, total = function(**given)
        assert y.requires_grad == bool(asking)
        assert total.requires_grad == bool({"x", "residual"}.intersection(asking))
        if asking:
            arriving = [torch.ones_like(X) for tensor in (y, total) if tensor.requires_grad]
            outputs = [tensor for tensor in (y, total) if tensor.requires_grad]
            gradients = torch.autograd.grad(outputs, [given[name] for name in asking], arriving)
            assert [gradient.shape for gradient in gradients] == [given[name].shape for name in asking]


@pytest.mark.parametrize("shape", [[64], torch.Size([64]), (64,)], ids=str)
def test_a_shape_of_any_kind_is_taken_again(shape: Any) -> None:
    for _ in range(2):
        assert torch.equal(normforge.layer_norm(X + 1, shape), torch.zeros_like(X))


@pytest.mark.parametrize("shape", [{0: 64}, {64}, "@", (64.0,)], ids=str)
def test_what_only_resembles_a_shape_is_refused_again(shape: Any) -> None:
    for _ in range(2):
        normforge.layer_norm(X, (64,))
        with pytest.raises(normforge.errors.DTypeError, match="takes a tuple of integers"):
            normforge.layer_norm(X, shape)


@each_norm
def test_a_known_call_gives_what_the_first_one_gave(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "plans", {})
    given = operands(norm, (5, 96), torch.float32)
    dy = torch.randn(5, 96)
    results = []
    for _ in range(3):
        y = call(norm, given)[0]
        results.append((y, *torch.autograd.grad(y, list(given.present().values()), dy)))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))
    assert len(dispatch.plans) == 2

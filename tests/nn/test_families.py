"""All families of norms: outputs and gradients against the formula in fp64, wherever families differ or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.calls.row_gradients import Backward
from proving.cases import (
    BACKWARD_TOLERANCES,
    EPS,
    FLOATS,
    FORWARD_TOLERANCES,
    LAYOUTS,
    Case,
    Tensors,
    arriving_at,
    cases,
    check,
    close,
    doubled,
    formula,
    operands,
)

from ..calling import FUNCTIONS, each_device, each_norm, plain, slices
from ..thorough import COSTLY, THOROUGH
from .models import WideLayerNorm, noted

# Without torch's own types, which it lacks.
forward_ad: Any = torch.autograd.forward_ad

BOTH = ("modulated", "gated")


def over(case: Case, names: list[str]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the function of a case's tensors in that order."""
    return lambda *tensors: case.run(dict(zip(names, tensors, strict=True)))


@pytest.fixture
def by_kernels(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """What is added to at each backward pass of rows in parts that is like none before: whether kernels computed it."""
    return noted(monkeypatch, Backward, "takes")


# Every pipeline's lengths, ragged and not.
SHAPES = ((5, 1), (3, 13), (2, 2, 100), (7, 1024), (3, 1500), (2, 4099), (1, 20000))
SLICES = slices(Path(__file__).with_name("families.yaml"))
# LayerNorm of one element is constant; of a sum that was rounded to be stored, its gradient is rounding error.
OF_ALL_PIPELINES = [
    plain(norm, shape=shape, dtype=dtype, residual=torch.float32 if shape == SHAPES[0] else dtype)
    for norm, shape, dtype in product(FUNCTIONS, SHAPES, FLOATS)
]
QUICK = dict.fromkeys([*OF_ALL_PIPELINES, *SLICES["with a sum"], *SLICES["quick"]])


def each_case(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", SLICES[name], ids=str)


@each_device
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=THOROUGH) for case in SLICES["combined"] if case not in QUICK)], ids=str
)
def test_outputs_and_gradients_are_those_of_fp64(case: Case, device: str) -> None:
    check(case, operands(case, device))


@each_device
@pytest.mark.parametrize("at", [0, 1])
@each_case("with a sum")
def test_a_gradient_arrives_at_one_output_alone(case: Case, at: int, device: str) -> None:
    given = operands(case, device)
    arriving: list[torch.Tensor | None] = [*arriving_at(case.run(given))]
    arriving[1 - at] = None
    check(case, given, arriving)


@each_device
@pytest.mark.parametrize("n", [100, 700, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1500, 9000))])
@pytest.mark.parametrize("case", cases(*BOTH, vary=("norm_before_gate",)), ids=str)
def test_gradients_in_each_pipeline(case: Case, n: int, device: str, by_kernels: list[Any]) -> None:
    long = case.but(shape=(2, 8, n))
    check(long, operands(long, device))
    narrow = long.but(group_size=n // 2) if case.family == "gated" else long.but(norm="rms", dtype=torch.bfloat16)
    check(narrow, operands(narrow, device))
    assert [are for _, are in by_kernels] == [True, True]


@each_device
@pytest.mark.parametrize(
    ("kind", "rows", "kernels"), [("sample", 9, True), ("sample", 7, False), ("all", 3, True), ("row", 9, False)]
)
def test_which_backward_passes_of_modulated_norms_are_kernels(
    kind: str, rows: int, kernels: bool, device: str, by_kernels: list[Any]
) -> None:
    """Of eight rows a sample and more."""
    (case,) = cases("modulated", vary=(), norm="rms", sharing=(kind,) * 3, shape=(3, rows, 40))
    check(case, operands(case, device))
    assert [are for _, are in by_kernels] == [kernels]


def second(outputs: Any, leaves: list[torch.Tensor], arriving: list[torch.Tensor]) -> Any:
    """Return the gradients, and those of one sum of all of them, of leaves and of what arrived."""
    first = torch.autograd.grad(outputs, leaves, arriving, create_graph=True)
    weights = torch.Generator().manual_seed(1)
    totals = [
        (gradient.double() * torch.randn(gradient.shape, generator=weights).double().to(gradient.device)).sum()
        for gradient in first
    ]
    return first, torch.autograd.grad(totals, [*leaves, *arriving], allow_unused=True)


@each_device
@each_case("gradients of gradients")
def test_a_gradient_of_a_gradient(case: Case, device: str) -> None:
    """Of every operand, and of what arrives."""
    given = operands(case, device)
    wide, outputs = doubled(given), case.run(given)
    arriving = [torch.randn_like(output).detach().requires_grad_() for output in outputs]
    exactly = [dy.detach().double().requires_grad_() for dy in arriving]
    first, found = second(outputs, list(given.values()), arriving)
    assert all(gradient.requires_grad for gradient in first if gradient.dtype is case["dtype"])
    _, wanted = second(formula(case, wide), list(wide.values()), exactly)
    names, leaves = [*given, *["dy", "dresidual_out"][: len(arriving)]], [*given.values(), *arriving]
    for name, leaf, gradient, wish in zip(names, leaves, found, wanted, strict=True):
        if gradient is None or wish is None:
            # Nothing depends on the sum's gradient but dx, whose gradient is constant in it; zeros either way.
            assert not any(each.any() for each in (gradient, wish) if each is not None), name
            continue
        assert (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape), name
        close(name, gradient, wish, BACKWARD_TOLERANCES[case["dtype"]])


@each_case("of every family")
def test_a_gradient_of_a_gradient_beneath_hooks_on_what_is_saved(case: Case) -> None:
    """As checkpoint and offloading set them, for a penalty on gradients say."""
    given = operands(case, "cpu")
    found = []
    for hooks in (nullcontext(), torch.autograd.graph.save_on_cpu()):
        with hooks:
            y = case.run(given)[0]
            (dx,) = torch.autograd.grad(y.sin().sum(), given["x"], create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), given["x"])[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@COSTLY
@pytest.mark.usefixtures("fresh_dynamo")
@each_case("of every family")
def test_compiled_autograd_is_one_graph(case: Case) -> None:
    given = operands(case, "cpu")
    whole = torch.compile(backend="eager", fullgraph=True)
    found = []
    for autograd in (nullcontext(), torch._dynamo.compiled_autograd._enable(whole)):
        y = case.run(given)[0]
        with autograd:
            found.append(torch.autograd.grad(y.square().sum(), list(given.values()), allow_unused=True))
    tolerance = BACKWARD_TOLERANCES[case["dtype"]]
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@each_case("small")
def test_where_no_kernel_runs_torch_computes_the_same(case: Case) -> None:
    given = operands(case)
    exact = doubled(given)
    for output, its in zip(case.run(exact), formula(case, exact), strict=True):
        assert output.dtype is torch.float64
        close("output", output, its, 1e-12)
    function = over(case, [*given])
    assert torch.autograd.gradcheck(function, tuple(exact.values()))
    assert torch.autograd.gradgradcheck(function, tuple(exact.values()), fast_mode=True, check_fwd_over_rev=True)

    leaves = [tensor.detach() for tensor in given.values()]
    mapped = torch.func.vmap(function)(*[torch.stack([leaf, leaf]) for leaf in leaves])
    for found, its in zip(mapped, function(*leaves), strict=True):
        close("mapped", found, torch.stack([its, its]).double(), 1e-5)


@each_device
@each_case("small")
def test_one_operand_alone_has_a_tangent_or_is_of_fp64(case: Case, device: str) -> None:
    """Also in a call that was known before."""
    given = {name: tensor.detach() for name, tensor in operands(case, device).items()}
    wide = {name: tensor.double() for name, tensor in given.items()}
    case.run(given)

    def tangents(run: Callable[[Tensors], tuple[torch.Tensor, ...]], at: Tensors) -> list[Any]:
        dual = forward_ad.make_dual(at[name], torch.ones_like(at[name]))
        return [forward_ad.unpack_dual(output).tangent for output in run(at | {name: dual})]

    for name in given:
        with forward_ad.dual_level():
            for found, its in zip(tangents(case.run, given), tangents(partial(formula, case), wide), strict=True):
                assert (found is None) == (its is None)
                if its is not None:
                    close(f"tangent of {name}", found, its, BACKWARD_TOLERANCES[case["dtype"]])
            assert all(forward_ad.unpack_dual(output).tangent is None for output in case.run(given))
        mixed = given | {name: wide[name]}
        outputs = case.run(mixed)
        assert outputs[0].dtype is mixed["residual" if case.family == "added" else "x"].dtype
        for output, its in zip(outputs, formula(case, wide), strict=True):
            close(f"fp64 {name}", output, its, FORWARD_TOLERANCES[case["dtype"]])


@THOROUGH
@each_device
@each_case("run twice")
def test_two_runs_give_the_same_bits(case: Case, device: str) -> None:
    given = operands(case, device)

    def once() -> list[torch.Tensor]:
        outputs = case.run(given)
        loss = [output.float().square().sum() for output in outputs]
        return [*outputs, *torch.autograd.grad(loss, list(given.values()))]

    assert all(map(torch.equal, once(), once()))


@THOROUGH
@each_device
@each_case("asked of one operand")
def test_only_what_asks_for_a_gradient_has_one(case: Case, device: str) -> None:
    for name in operands(case):
        given = operands(case, device)
        for other, tensor in given.items():
            tensor.requires_grad_(other == name)
        check(case, given)
        outputs = case.run(given)
        assert outputs[0].requires_grad
        summed = {"x", "x_bias", "gate", "residual", *(("weight", "bias") if case.family == "renormed" else ())}
        assert all(total.requires_grad == (name in summed) for total in outputs[1:])
        torch.autograd.backward([outputs[0].square().sum()])
        assert [other for other, tensor in given.items() if tensor.grad is not None] == [name]
        with torch.no_grad():
            # GroupNorm's kernels that save no statistics may round some values the other way.
            assert case.family == "group" or torch.equal(case.run(given)[0], outputs[0])


@each_device
@pytest.mark.parametrize("layout", ["transposed", "expanded", "gapped", "offset", "negated"])
@each_case("with gradients anywhere")
def test_a_gradient_that_arrives_may_lie_anyhow(case: Case, layout: str, device: str, by_kernels: list[Any]) -> None:
    given = operands(case, device)
    arrived = LAYOUTS[layout](torch.randn_like(given["x"]))
    check(case, given, [arrived] * (2 if "residual" in given else 1))
    assert [are for _, are in by_kernels] == [layout != "negated"] * (case.family in BOTH)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(*BOTH, "group", vary=("norm",), dtype=torch.bfloat16), ids=str)
def test_autocast_gives_the_type_that_torch_gives(case: Case) -> None:
    given = operands(case, "cuda")
    plain = getattr(torch.nn.functional, f"{case['norm']}_norm")
    assert case.run(given)[0].dtype is torch.bfloat16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(2):
            assert case.run(given)[0].dtype is plain(given["x"], case["shape"][-1:]).dtype


@each_norm
def test_a_third_derivative(norm: str) -> None:
    """Held against the formula: torch 2.13's of its own layer_norm is another, in fp64 too."""
    function: Any = getattr(normforge, f"{norm}_norm")
    x, directions = torch.randn(3, 24), torch.randn(3, 3, 24)

    def formula(s: torch.Tensor, shape: Any, eps: float) -> torch.Tensor:
        centred = s - s.mean(-1, keepdim=True) if norm == "layer" else s
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()

    def third(call: Any, leaf: torch.Tensor) -> torch.Tensor:
        gradient = call(leaf, (24,), eps=EPS).square()
        for step, direction in enumerate(directions.to(leaf.dtype)):
            (gradient,) = torch.autograd.grad((gradient * direction).sum(), leaf, create_graph=step < 2)
        assert isinstance(gradient, torch.Tensor)
        return gradient

    found = third(function, x.clone().requires_grad_())
    assert not found.requires_grad
    close("third derivative", found, third(formula, x.double().requires_grad_()), 1e-4)


def patched(kind: Callable[..., torch.nn.Module]) -> torch.nn.Module:
    """Return a patched norm of two elements, which computes by normforge where torch's own second tangent is wrong."""
    model = torch.nn.Sequential(kind(2, eps=0.25))
    next(model.parameters()).data = torch.tensor([1.0, 2.0])
    assert len(normforge.patch(model).swapped) == 1
    return model


@pytest.mark.parametrize("kind", [None, torch.nn.LayerNorm, WideLayerNorm], ids=["function", "LayerNorm", "wide"])
def test_the_second_tangent_of_a_layer_norm(kind: Callable[..., torch.nn.Module] | None) -> None:
    """In torch's own, patched or not, see pytorch#196700."""
    model = None if kind is None else patched(kind)

    def f(t: torch.Tensor) -> torch.Tensor:
        row = torch.stack([t, torch.zeros_like(t)])
        if model is None:
            return normforge.layer_norm(row, (2,), torch.tensor([1.0, 2.0], dtype=t.dtype), eps=0.25).sum()
        y: torch.Tensor = model(row)
        return y.sum()

    for dtype in (torch.float32, torch.float64):
        t = torch.tensor(0.7, dtype=dtype)
        if model is not None:
            model.to(dtype)
        for then in (torch.func.jacfwd, torch.func.jacrev):
            assert then(torch.func.jacfwd(f))(t).item() == pytest.approx(0.7749, abs=1e-4)

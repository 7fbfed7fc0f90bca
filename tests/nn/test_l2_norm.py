"""L2 norms, with eps added to the squares or clamped at eps, against the formula in fp64 and autograd's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import normforge
from normforge.codegen import values as words
from normforge.codegen.model import Mode
from normforge.codegen.tiling import class_of
from normforge.codegen.values import Direction, DType, Norm
from normforge.errors import IllegalCombinationError
from normforge.tools.compare import TOLERANCES

from ..calling import FLOATS, LENGTHS, same_bits

EPS = 0.5
ROWS = 5

each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
each_length = pytest.mark.parametrize("n", [1, 7, *LENGTHS.values()])
each_norm = pytest.mark.parametrize("norm", [Norm.L2, Norm.L2_CLAMPED], ids=lambda norm: norm.value)
each_weight = pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])


def exact(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = EPS, norm: Norm = Norm.L2) -> torch.Tensor:
    """The definition, in fp64 and by other operations than kernels and oracle use."""
    wide = x.double()
    y = wide / torch.sqrt(wide.square().sum(-1, keepdim=True) + eps)
    if norm is Norm.L2_CLAMPED:
        y = torch.nn.functional.normalize(wide, dim=-1, eps=eps)
    return y if weight is None else y * weight.double()


def drawn(n: int, dtype: torch.dtype, weighted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of which one is zeros and one is a little shorter than EPS, and a weight."""
    x = torch.randn(ROWS, n)
    x[1] = 0.0
    x[2] *= 0.8 * EPS / x[2].norm()
    return x.to(dtype), torch.randn(n).to(dtype) if weighted else None


def public(norm: Norm, suffix: str = "") -> Any:
    """A function of a norm: the differentiable one, or that with a suffix."""
    return getattr(normforge, norm.row.stem + suffix if suffix else norm.row.function)


def agree(actual: torch.Tensor | None, expected: torch.Tensor, sums: int = 1) -> None:
    """Fail unless a tensor is what it should be, rounded once; `sums` is how many terms each value is a sum of."""
    assert actual is not None
    size = float(expected.abs().max()) or 1.0
    rtol = TOLERANCES[actual.dtype].rtol
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=2e-6 * sums * size)


@each_weight
@each_length
@each_float
@each_norm
def test_outputs(norm: Norm, dtype: torch.dtype, n: int, weighted: bool) -> None:
    x, weight = drawn(n, dtype, weighted)
    output = public(norm, "2d_fwd")(x, weight, eps=EPS, save_mv=True)
    assert output.y.dtype == dtype
    agree(output.y, exact(x, weight, norm=norm))
    assert output.mean is None
    squares = x.double().square().sum(-1)
    clamped = torch.where(squares.sqrt() < EPS, -1 / EPS, squares.rsqrt())
    agree(output.rstd, clamped if norm is Norm.L2_CLAMPED else (squares + EPS).rsqrt())
    assert same_bits(public(norm)(x, weight, EPS), output.y)


@each_weight
@each_length
@each_float
@each_norm
def test_gradients(norm: Norm, dtype: torch.dtype, n: int, weighted: bool) -> None:
    x, weight = drawn(n, dtype, weighted)
    leaves = [tensor.requires_grad_() for tensor in (x, weight) if tensor is not None]
    dy = torch.randn(ROWS, n).to(dtype)
    actual = torch.autograd.grad(public(norm)(x, weight, EPS), leaves, dy)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(exact(wide[0], wide[1] if weighted else None, norm=norm), wide, dy.double())
    for gradient, wanted in zip(actual, expected, strict=True):
        assert gradient.dtype == dtype
        agree(gradient, wanted, sums=ROWS)


@each_norm
def test_second_derivatives(norm: Norm) -> None:
    x = torch.randn(3, 16, requires_grad=True)
    weight = torch.randn(16, requires_grad=True)
    # One row is shorter than eps.
    eps = float(x.detach().norm(dim=-1).min()) * 1.001

    def twice(function: Any, *leaves: torch.Tensor) -> Sequence[torch.Tensor]:
        first = torch.autograd.grad(function(*leaves, eps).pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.cat([gradient.flatten() for gradient in first]).square().sum(), leaves)

    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    formula = partial(exact, norm=norm)
    for actual, expected in zip(twice(public(norm), x, weight), twice(formula, *wide), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_heads_of_a_packed_tensor_are_read_where_they_are() -> None:
    """Queries and keys: rows on two strides."""
    qkv = torch.randn(3, 12, 64).bfloat16()
    y = normforge.l2_norm(qkv[:, :4], eps=EPS)
    assert y.shape == (3, 4, 64)
    agree(y, exact(qkv[:, :4]))


@pytest.mark.parametrize("value", [0.0, 1e-20, 1e18])
@each_norm
def test_rows_of_any_size(norm: Norm, value: float) -> None:
    x = torch.full((2, 40), value)
    agree(public(norm)(x, eps=1e-6), exact(x, eps=1e-6, norm=norm))


def test_a_nan_is_not_clamped() -> None:
    x = torch.randn(3, 40)
    x[1, 0] = float("nan")
    assert normforge.normalize(x).isnan().all(-1).tolist() == [False, True, False]


@each_norm
def test_torch_computes_what_kernels_cannot(norm: Norm) -> None:
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    torch.testing.assert_close(public(norm)(x, weight, EPS), exact(x, weight, norm=norm))
    rows = torch.randn(3, 8)
    torch.testing.assert_close(
        torch.func.grad(lambda x: public(norm)(x, eps=EPS).pow(3).sum())(rows).double(),
        torch.func.grad(lambda x: exact(x, norm=norm).pow(3).sum())(rows.double()),
        rtol=1e-5,
        atol=1e-5,
    )
    assert public(norm)(torch.empty(3, 0)).shape == (3, 0)


@each_norm
def test_a_graph_holds_one_operator(norm: Norm) -> None:
    graph = make_fx(lambda x: public(norm)(x, eps=EPS), tracing_mode="fake")(torch.randn(3, 8)).graph
    assert [str(node.target) for node in graph.nodes if "normforge" in str(node.target)] == [
        f"normforge.{norm.row.stem}2d_fwd.default"
    ]
    x = drawn(32, torch.float32, False)[0].requires_grad_()
    compiled: Any = torch.compile(public(norm), backend="aot_eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(x, eps=EPS).pow(3).sum(), x)
    (expected,) = torch.autograd.grad(public(norm)(x, eps=EPS).pow(3).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_a_graph_writes_where_it_is_told() -> None:
    def write(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        normforge.l2norm2d_fwd(x, eps=EPS, out=out)
        return out

    x, out = torch.randn(3, 32), torch.zeros(3, 32)
    torch.compile(write, backend="aot_eager", fullgraph=True)(x, out)
    agree(out, exact(x))


BESIDE: dict[str, dict[str, Any]] = {
    "fadd pre_add": {"fadd": "pre_add"},
    "x_bias true": {"x_bias": True},
    "cast before_weight": {"cast": "before_weight"},
    "modulated true": {"modulated": True},
    "gating after_norm": {"gating": "after_norm"},
    "group_size 32": {"group_size": "32", "dtype_out": "fp8_e4m3fn", "fquant": "dynamic"},
    "fquant static, quantise_rounded": {"fquant": "static", "dtype_out": "int8", "quantise_rounded": True},
}


@pytest.mark.parametrize(("said", "axes"), BESIDE.items(), ids=BESIDE)
def test_nothing_stands_beside_it(said: str, axes: dict[str, Any]) -> None:
    types = Mode.__annotations__
    values: dict[str, Any] = {"dtype_out": DType.BF16}
    values |= {name: word if word is True else getattr(words, types[name])(word) for name, word in axes.items()}
    Mode(Norm.RMS, DType.BF16, **values)
    with pytest.raises(IllegalCombinationError, match=f"norm l2 has no {said}; leave .* out, or use another norm"):
        Mode(Norm.L2, DType.BF16, **values)


@pytest.mark.parametrize("direction", Direction)
def test_tiles_are_those_of_rms_norm(direction: Direction) -> None:
    l2, rms = (Mode(norm, DType.BF16, DType.BF16, direction=direction) for norm in (Norm.L2, Norm.RMS))
    assert class_of(l2) == class_of(rms)

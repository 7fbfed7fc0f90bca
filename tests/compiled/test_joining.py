"""What joins a norm in a graph and what does not, each held against the same calls without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import normforge

from .graphs import ADD, Traced

M, N = 3, 16
# Cases are drawn when the module is imported, before any test sets torch's seed.
NUMBERS = torch.Generator().manual_seed(0)

Function = Callable[..., Any]


def rows(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(size or (M, N)), dtype=dtype, generator=NUMBERS)


def agree(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Fail unless results are alike, their types and strides too."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(*(torch.utils._pytree.tree_leaves(each) for each in (actual, expected)), strict=True):
        assert a.stride() == b.stride()


def norm(x: torch.Tensor, weight: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    return normforge.rmsnorm2d_fwd(x, weight, **options).y


HALF = torch.bfloat16


class Parameters(NamedTuple):
    """What norms are given beside rows."""

    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


GIVEN = Parameters(*(torch.linspace(*between) for between in ((0.5, 1.5, N), (-1, 1, N), (-1, 1, M), (1, 2, M))))


def twice(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    return norm(total, p.weight), norm(total, p.bias), total


def read_first(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    return total * 2, norm(total, p.weight)


def reshaped(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    out = normforge.layernorm2d_fwd(total.view(-1, N), p.weight, p.bias, save_mv=True)
    assert out.mean is not None
    assert out.rstd is not None
    return out.y, out.mean, out.rstd, total


def quantised(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = normforge.rmsnorm2d_fwd(x + residual, p.weight, fquant="dynamic")
    assert out.y_scale is not None
    return out.y, out.y_scale


def quantised_by_groups(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = (x + residual).flatten(0, -2)
    found = normforge.quantised_rms_norm(total, p.weight, group_size=32, out_dtype=torch.float8_e4m3fn)
    assert found.y_scale is not None
    return found.y.float(), found.y_scale


def modulated(p: Parameters, x: torch.Tensor) -> torch.Tensor:
    return normforge.modulated_layer_norm(x, p.weight, p.bias)


def between_kernels(p: Parameters, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Inductor computes this apart, because mm reads it from memory.
    activated = torch.relu(x)
    return norm(activated + activated @ other)


# By what they are: the call, its operands, and how much is joined.
SUMS: dict[str, tuple[Function, list[torch.Tensor], int]] = {
    "a sum that only the norm reads": (lambda p, x, r: norm(x + r, p.weight), [rows(), rows()], 1),
    "a sum that is returned": (lambda p, x, r: (s := x + r, norm(s)), [rows(), rows()], 1),
    "two norms of a sum": (twice, [rows(), rows()], 1),
    "a sum that is read before the norm": (read_first, [rows(), rows()], 1),
    "a sum in another shape": (reshaped, [rows(2, M, N), rows(2, M, N)], 1),
    "a sum of two dtypes": (lambda p, x, r: (s := x + r, norm(s)), [rows(dtype=HALF), rows()], 1),
    "the other way round": (lambda p, x, r: (s := r + x, norm(s)), [rows(dtype=HALF), rows()], 1),
    "16 bits that are widened first": (lambda p, x, r: (s := x.float() + r, norm(s)), [rows(dtype=HALF), rows()], 1),
    "rows that lie apart": (lambda p, x, r: (s := x[:, :N] + r, norm(s)), [rows(M, 3 * N), rows()], 1),
    "a quantised norm": (quantised, [rows(), rows()], 1),
    "one row's sum": (lambda p, x, r: norm(x + r), [rows(N), rows(N)], 1),
    "two sums of two": (lambda p, x, r, a, b: (norm(x + r), norm(a + b)), [rows(), rows(), rows(), rows()], 2),
    "an operand that a kernel between has read": (between_kernels, [rows(), rows(N, N)], 1),
    "a bias": (lambda p, x, b: norm(x + b, p.weight), [rows(), rows(N)], 1),
    "a bias of another dtype": (lambda p, x, b: norm(x + b), [rows(dtype=HALF), rows(N)], 1),
    "a bias and a residual": (lambda p, x, b, r: (s := (x + b) + r, norm(s)), [rows(), rows(N), rows()], 1),
    "norms that are modulated": (lambda p, x, r: modulated(p, x + r), [rows(), rows()], 1),
    "a sum that is modulated and returned": (lambda p, x, r: (s := x + r, modulated(p, s)), [rows(), rows()], 1),
    "a norm quantised in groups": (quantised_by_groups, [rows(), rows()], 1),
}


@pytest.mark.parametrize("case", SUMS.values(), ids=SUMS)
def test_a_sum_joins_the_norm_of_it(case: tuple[Function, list[torch.Tensor], int]) -> None:
    call, operands, joined = case
    function = Traced(call, GIVEN, *operands)
    agree(function(GIVEN, *operands), call(GIVEN, *operands))
    assert function.applied["join_sum"] == joined
    assert function.count(ADD) == 0


def added_in_place(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    residual.add_(x)
    return norm(residual)


def copied_out(p: Parameters, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    total = x + residual
    y = norm(total)
    out.copy_(total)
    return y


def written_afterwards(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    y = norm(x + residual)
    x.mul_(2)
    return y


def behind_a_long_kernel(
    p: Parameters, x: torch.Tensor, residual: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    total = x + residual
    return x @ other, norm(total)


def with_a_weight_of_the_sum(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    total = x + residual
    return norm(total, total.sum(0))


def transposed(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    return total, norm(total.contiguous())


def with_fadd(p: Parameters, x: torch.Tensor, residual: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return norm(x + other, residual=residual, fadd="pre_add")


def with_x_bias(p: Parameters, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    return norm(total, x_bias=p.bias), total


NOT_SUMS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "x twice": (lambda p, x: (s := x + x, norm(s)), [rows()]),
    "views of one tensor": (lambda p, x: (s := x[0] + x[1], norm(s)), [rows(2, M, N)]),
    "a number": (lambda p, x: (s := x + 1.5, norm(s)), [rows()]),
    "alpha": (lambda p, x, r: (s := torch.add(x, r, alpha=2), norm(s)), [rows(), rows()]),
    "a row that is broadcast": (lambda p, x, r: (s := x + r, norm(s)), [rows(), rows(1, N)]),
    "a column that is broadcast": (lambda p, x, r: norm(x + r), [rows(), rows(M, 1)]),
    "rows that are broadcast": (lambda p, x, r: norm(x + r), [rows(2, M, N), rows(M, N)]),
    "a bias of a sum that is returned": (lambda p, x, b: (s := x + b, norm(s)), [rows(), rows(N)]),
    "an operand of the sum's own kernel": (lambda p, x, r: (s := x * 2 + r, norm(s)), [rows(), rows()]),
    "an operand of it that is returned too": (
        lambda p, x, r: (twice := x * 2, s := twice + r, norm(s)),
        [rows(), rows()],
    ),
    "in place": (added_in_place, [rows(), rows()]),
    "an operand that is written to afterwards": (written_afterwards, [rows(), rows()]),
    "copied out": (copied_out, [rows(), rows(), rows()]),
    "behind a long kernel": (behind_a_long_kernel, [rows(), rows(), rows(N, N)]),
    "a weight of the sum": (with_a_weight_of_the_sum, [rows(), rows()]),
    "a transposed sum": (transposed, [rows(N, M).t(), rows(N, M).t()]),
    "rows in another shape whose scales are of groups": (quantised_by_groups, [rows(2, M, N), rows(2, M, N)]),
    "other rows": (lambda p, x, r: (s := x + r, norm(s.view(-1, N // 2))), [rows(), rows()]),
    "two 16-bit types": (lambda p, x, r: (s := x + r, norm(s)), [rows(dtype=HALF), rows(dtype=torch.float16)]),
    "what is added to a residual already": (with_fadd, [rows(), rows(), rows()]),
    "what a bias is added to as well": (with_x_bias, [rows(), rows()]),
    "a residual that a gated norm does not take": (
        lambda p, x, r, gate: normforge.gated_rms_norm(x + r, gate, p.weight),
        [rows(), rows(), rows()],
    ),
    "a bias that a modulated norm does not take": (lambda p, x, b: modulated(p, x + b), [rows(), rows(N)]),
    "doubles": (lambda p, x, r: (s := x + r, norm(s.float())), [rows(dtype=torch.float64), rows(dtype=torch.float64)]),
    "integers": (lambda p, x, r: (s := x + r, norm(s)), [rows(), torch.ones(M, N, dtype=torch.int32)]),
    "rounded elsewhere": (
        lambda p, x, r: (s := x + r, norm(s, p.weight, cast="before_weight")),
        [rows(dtype=HALF), rows()],
    ),
}


@pytest.mark.parametrize("case", NOT_SUMS.values(), ids=NOT_SUMS)
def test_what_joins_no_norm(case: tuple[Function, list[torch.Tensor]]) -> None:
    call, operands = case
    function = Traced(call, GIVEN, *operands)
    mine, its = ([operand.clone() for operand in operands] for _ in range(2))
    agree(function(GIVEN, *mine), call(GIVEN, *its))
    agree(mine, its)
    assert not sum(function.applied.values())


CASTS: dict[str, tuple[Function, torch.Tensor, int]] = {
    "of fp32 rows": (lambda p, x: norm(x, p.weight).bfloat16(), rows(), 1),
    "of fp32 y of 16-bit rows": (lambda p, x: norm(x, out_dtype=torch.float32).half(), rows(dtype=HALF), 1),
    "of two readers": (lambda p, x: ((y := norm(x)).bfloat16() * 2, y.view(-1).bfloat16()), rows(), 1),
    "of one of two readers": (lambda p, x: ((y := norm(x)).bfloat16(), y * 2), rows(), 0),
    "to two types": (lambda p, x: ((y := norm(x)).bfloat16(), y.half()), rows(), 0),
    "to fp32 of what is rounded": (lambda p, x: norm(x).float(), rows(dtype=HALF), 0),
    "of what is rounded to other 16 bits": (lambda p, x: norm(x).half(), rows(dtype=HALF), 0),
    "to integers": (lambda p, x: norm(x).int(), rows(), 0),
    "rounded before the weight": (lambda p, x: norm(x, p.weight, cast="before_weight").bfloat16(), rows(), 0),
    "rounded before the weight to the same": (
        lambda p, x: norm(x, p.weight, cast="before_weight", out_dtype=torch.float32).bfloat16(),
        rows(dtype=HALF),
        1,
    ),
}


@pytest.mark.parametrize("case", CASTS.values(), ids=CASTS)
def test_a_cast_joins_where_y_is_rounded_once(case: tuple[Function, torch.Tensor, int]) -> None:
    call, x, joined = case
    function = Traced(call, GIVEN, x)
    agree(function(GIVEN, x), call(GIVEN, x), 0)
    assert function.applied["join_cast"] == sum(function.applied.values()) == joined


def backward(p: Parameters, dy: torch.Tensor, x: torch.Tensor, **options: Any) -> normforge.calls.outputs.NormGradients:
    return normforge.rmsnorm2d_bwd(dy, x, p.weight, rstd=p.rstd, **options)


def dx(p: Parameters, dy: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    gradient = normforge.layernorm2d_bwd(dy, x, p.weight, mean=p.mean, rstd=p.rstd, **options).dx
    assert gradient is not None
    return gradient


def in_another_shape(p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return dx(p, dy, x).view(-1, 2, N) + g


def beside_dweight(
    p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    gradients = backward(p, dy, x, wants=("dx", "dweight"))
    assert gradients.dx is not None
    return g + gradients.dx, gradients.dweight


def made_in_between(p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return dx(p, dy, x) + torch.relu(g)


# The call, its operands, how many additions join, and how many stay.
GRADIENTS: dict[str, tuple[Function, list[torch.Tensor], int, int]] = {
    "g + dx": (lambda p, dy, x, g: g + dx(p, dy, x), [rows(), rows(), rows()], 1, 0),
    "dx + g": (lambda p, dy, x, g: dx(p, dy, x) + g, [rows(), rows(), rows()], 1, 0),
    "beside dweight": (beside_dweight, [rows(), rows(), rows()], 1, 0),
    "in another shape": (in_another_shape, [rows(4, N), rows(4, N), rows(2, 2, N)], 1, 0),
    "made between dx and the sum": (made_in_between, [rows(), rows(), rows()], 1, 0),
    "g of fp32, dx of 16 bits": (
        lambda p, dy, x, g: g + dx(p, dy, x),
        [rows(dtype=HALF), rows(dtype=HALF), rows()],
        1,
        0,
    ),
    "two norms of a tensor": (lambda p, dy, x: dx(p, dy, x) + dx(p, x, x), [rows(), rows()], 1, 0),
    "two norms, and a gradient first": (
        lambda p, dy, x, g: (g + dx(p, dy, x)) + dx(p, x, x),
        [rows(), rows(), rows()],
        2,
        0,
    ),
    "two norms, and a gradient last": (
        lambda p, dy, x, g: g + (dx(p, dy, x) + dx(p, x, x)),
        [rows(), rows(), rows()],
        2,
        0,
    ),
    "dx that is dy of the other too": (
        lambda p, dy, x, g: (dx(p, first := dx(p, dy, x), dy) + first) + g,
        [rows(), rows(), rows()],
        1,
        1,
    ),
    "several gradients, added first": (
        lambda p, dy, x, g, h: (g + h) + dx(p, dy, x),
        [rows(), rows(), rows(), rows()],
        1,
        1,
    ),
}


_OPERATORS = torch.ops.normforge


def modulated_dx(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    statistics = (p.mean, p.rstd, None, None, None)
    found: list[torch.Tensor] = _OPERATORS.modulated_layer_norm_backward(
        dy, x, p.weight, p.bias, None, None, None, *statistics, ["dx"]
    )
    return found[0]


def of_a_gated_sum(p: Parameters, dy: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = (dy, x, p.weight, p.bias, p.weight, None, p.rstd, x, None, None, 0.0)
    dx, dgated = _OPERATORS.modulated_rms_norm_backward(*given, ["dx", "dgated"])
    return dx + other, dgated


def of_a_gated_norm(p: Parameters, dy: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    words = ("after_norm", "silu", 0.0, ["dx"])
    found: list[torch.Tensor] = _OPERATORS.gated_rms_norm_backward(dy, x, x, p.weight, p.rstd, *words)
    return found[0] + other


GRADIENTS |= {
    "of a modulated norm": (lambda p, dy, x, g: modulated_dx(p, dy, x) + g, [rows(), rows(), rows()], 1, 0),
    "of a sum that a gate is a part of": (of_a_gated_sum, [rows(), rows(), rows()], 0, 1),
    "of a gated norm": (of_a_gated_norm, [rows(), rows(), rows()], 0, 1),
}


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_a_gradient_is_added_where_dx_is_computed(case: tuple[Function, list[torch.Tensor], int, int]) -> None:
    call, operands, joined, left = case
    given = GIVEN if operands[0].shape[0] == M else GIVEN._replace(mean=torch.zeros(4), rstd=torch.ones(4))
    function = Traced(call, given, *operands)
    agree(function(given, *operands), call(given, *operands), 1e-5 if operands[0].dtype is torch.float32 else 1e-2)
    assert function.applied["join_gradient"] == joined
    assert function.count(ADD) == left


def read_besides(p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradient = dx(p, dy, x)
    return gradient + g, gradient


def made_of_dweight(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gradients = backward(p, dy, x, wants=("dx", "dweight"))
    assert gradients.dx is not None
    assert gradients.dweight is not None
    return gradients.dx + gradients.dweight.expand(M, N).clone()


def made_by_a_long_kernel(p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    gradient = dx(p, dy, x)
    return gradient + dy @ g


def written_before(p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    gradient = dx(p, dy, x)
    dy.add_(1)
    return gradient + g


def accumulated(p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return g.copy_(g + dx(p, dy, x))


NOT_GRADIENTS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "dx that is read besides": (read_besides, [rows(), rows(), rows()]),
    "dx twice": (lambda p, dy, x: (d := dx(p, dy, x)) + d, [rows(), rows()]),
    "alpha": (lambda p, dy, x, g: torch.add(dx(p, dy, x), g, alpha=2), [rows(), rows(), rows()]),
    "a number": (lambda p, dy, x: dx(p, dy, x) + 1, [rows(), rows()]),
    "a row that is broadcast": (lambda p, dy, x, g: dx(p, dy, x) + g, [rows(), rows(), rows(N)]),
    "dx that is broadcast": (lambda p, dy, x, g: dx(p, dy, x) + g, [rows(), rows(), rows(2, M, N)]),
    "what comes of dweight": (made_of_dweight, [rows(), rows()]),
    "what a long kernel makes between": (made_by_a_long_kernel, [rows(), rows(), rows(N, N)]),
    "behind a write": (written_before, [rows(), rows(), rows()]),
    "accumulated in place": (accumulated, [rows(), rows(), rows()]),
    "dx whose sum is the gradient of a bias": (
        lambda p, dy, x, g: ((d := backward(p, dy, x, x_bias=p.bias, wants=("dx", "dx_bias"))).dx + g, d.dx_bias),
        [rows(), rows(), rows()],
    ),
    "dx of which some is dropped": (
        lambda p, dy, x, g, rng: (
            (d := backward(p, dy, x, dropout_p=0.5, dropout_rng=rng, wants=("dx", "ddropped"))).dx + g,
            d.ddropped,
        ),
        [rows(), rows(), rows(), torch.tensor([5, 6])],
    ),
    "doubles": (lambda p, dy, x, g: dx(p, dy, x) + g, [rows(), rows(), rows(dtype=torch.float64)]),
    "integers": (lambda p, dy, x, g: dx(p, dy, x) + g, [rows(), rows(), torch.ones(M, N, dtype=torch.int32)]),
    "a transposed gradient": (lambda p, dy, x, g: dx(p, dy, x) + g, [rows(), rows(), rows(N, M).t()]),
    "what has a gradient already": (
        lambda p, dy, x, g, h: dx(p, dy, x, dresidual_out=h) + g,
        [rows(), rows(), rows(), rows()],
    ),
    "dweight": (
        lambda p, dy, x, g: backward(p, dy, x, wants=("dweight",)).dweight + g,
        [rows(), rows(), rows(N)],
    ),
}


@pytest.mark.parametrize("case", NOT_GRADIENTS.values(), ids=NOT_GRADIENTS)
def test_what_is_added_to_dx_afterwards(case: tuple[Function, list[torch.Tensor]]) -> None:
    call, operands = case
    function = Traced(call, GIVEN, *operands)
    mine, its = ([operand.clone() for operand in operands] for _ in range(2))
    agree(function(GIVEN, *mine), call(GIVEN, *its))
    agree(mine, its)
    assert not sum(function.applied.values())


@pytest.mark.parametrize("cast", ["after_weight", "before_weight"])
def test_a_gradient_in_16_bits_is_read_as_it_is(cast: str) -> None:
    def call(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return dx(p, dy.float(), x, cast=cast)

    for x, joined in ((rows(), cast == "after_weight"), (rows(dtype=HALF), True)):
        operands = rows(dtype=HALF), x
        function = Traced(call, GIVEN, *operands)
        agree(function(GIVEN, *operands), call(GIVEN, *operands), 0)
        assert function.applied["join_widening"] == joined


def over_rows(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradient = dx(p, dy, x)
    return gradient, gradient.sum(0)


def over_rows_of_two(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = dx(p, dy, x), dx(p, x, dy)
    return first, second, first.sum(0, keepdim=True), second.sum(0)


def beside_dweight_and_over_rows(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = backward(p, dy, x, wants=("dx", "dweight"))
    assert gradients.dx is not None
    return gradients.dx.sum(0), gradients.dweight, gradients.dx


def with_a_gradient_over_rows(
    p: Parameters, dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    gradient = dx(p, dy, x) + g
    return gradient, gradient.sum(0)


def rounded_over_rows(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    narrow = dx(p, dy, x).to(HALF)
    return narrow, narrow.sum(0)


def over_leading_dimensions(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gradient = dx(p, dy, x)
    return gradient, gradient.view(2, -1, N).sum((0, 1))


# The call, its operands, and how many sums join.
OVER_ROWS: dict[str, tuple[Function, list[torch.Tensor], int]] = {
    "a sum": (over_rows, [rows(), rows()], 1),
    "a sum in 16 bits": (over_rows, [rows(dtype=HALF), rows(dtype=HALF)], 1),
    "of two norms": (over_rows_of_two, [rows(), rows()], 2),
    "beside dweight": (beside_dweight_and_over_rows, [rows(), rows()], 1),
    "with the residual's gradient": (with_a_gradient_over_rows, [rows(), rows(), rows()], 1),
    "of dx that is rounded first": (rounded_over_rows, [rows(), rows()], 1),
    "of several dimensions": (over_leading_dimensions, [rows(4, N), rows(4, N)], 1),
}


@pytest.mark.parametrize("case", OVER_ROWS.values(), ids=OVER_ROWS)
def test_dx_is_added_up_where_it_is_computed(case: tuple[Function, list[torch.Tensor], int]) -> None:
    call, operands, joined = case
    given = GIVEN if operands[0].shape[0] == M else GIVEN._replace(mean=torch.zeros(4), rstd=torch.ones(4))
    function = Traced(call, given, *operands)
    found, expected = function(given, *operands), call(given, *operands)
    agree(found, expected, 1e-5 if all(each.dtype is torch.float32 for each in expected) else 1e-2)
    assert function.applied["join_column_sum"] == joined
    assert not function.count("aten.sum")
    # One row of zeros for all.
    assert function.count("aten.full") == 1


def doubled_before(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gradient = dx(p, dy, x)
    gradient.mul_(2)
    return gradient.sum(0)


def with_a_bias(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradients = backward(p, dy, x, x_bias=p.bias, wants=("dx", "dx_bias"))
    assert gradients.dx is not None
    return gradients.dx.sum(0), gradients.dx_bias


def with_dropout(
    p: Parameters, dy: torch.Tensor, x: torch.Tensor, rng: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    gradients = backward(p, dy, x, dropout_p=0.5, dropout_rng=rng, wants=("dx", "ddropped"))
    assert gradients.dx is not None
    return gradients.dx.sum(0), gradients.ddropped


def over_dweight(p: Parameters, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dweight = backward(p, dy, x, wants=("dweight",)).dweight
    assert dweight is not None
    return dweight.view(1, N).sum(0)


NOT_OVER_ROWS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "over columns": (lambda p, dy, x: dx(p, dy, x).sum(1), [rows(), rows()]),
    "over everything": (lambda p, dy, x: dx(p, dy, x).sum(), [rows(), rows()]),
    "over some of the rows": (lambda p, dy, x: dx(p, dy, x)[1:].sum(0), [rows(), rows()]),
    "over a leading dimension of two": (lambda p, dy, x: dx(p, dy, x).view(1, M, N).sum(0), [rows(), rows()]),
    "of halves of rows": (lambda p, dy, x: dx(p, dy, x).view(2 * M, N // 2).sum(0), [rows(), rows()]),
    "in doubles": (lambda p, dy, x: dx(p, dy, x).sum(0, dtype=torch.float64), [rows(), rows()]),
    "of what is an integer first": (lambda p, dy, x: dx(p, dy, x).int().sum(0), [rows(), rows()]),
    "of what was written to": (doubled_before, [rows(), rows()]),
    "of what has the gradient of a bias": (with_a_bias, [rows(), rows()]),
    "of what is dropped from": (with_dropout, [rows(), rows(), torch.tensor([5, 6])]),
    "dweight": (over_dweight, [rows(), rows()]),
}


@pytest.mark.parametrize("case", NOT_OVER_ROWS.values(), ids=NOT_OVER_ROWS)
def test_what_is_not_the_sum_over_rows(case: tuple[Function, list[torch.Tensor]]) -> None:
    call, operands = case
    function = Traced(call, GIVEN, *operands)
    agree(function(GIVEN, *operands), call(GIVEN, *operands))
    assert not function.applied["join_column_sum"]
    assert not function.count("aten.full")

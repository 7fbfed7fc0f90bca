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
HALF = torch.bfloat16


def rows(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(size or (M, N)), dtype=dtype, generator=NUMBERS)


def half() -> torch.Tensor:
    return rows(dtype=HALF)


def alike(count: int) -> list[torch.Tensor]:
    """Some rows of the usual size."""
    return [rows() for _ in range(count)]


class Parameters(NamedTuple):
    """What norms are given beside rows."""

    weight: torch.Tensor
    bias: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def parameters(m: int) -> Parameters:
    """Of m rows."""
    return Parameters(*(torch.linspace(*between) for between in ((0.5, 1.5, N), (-1, 1, N), (-1, 1, m), (1, 2, m))))


class Case(NamedTuple):
    """A call.

    Attributes:
        call: of parameters and operands.
        operands: the tensors.
        joined: how often the rule of the table that the case stands in applies.
        left: how many additions stay where something joins.
    """

    call: Callable[..., Any]
    operands: list[torch.Tensor]
    joined: int = 1
    left: int = 0


def norm(x: Any, weight: Any = None, **options: Any) -> Any:
    return normforge.rmsnorm2d_fwd(x, weight, **options).y


def modulated(p: Parameters, x: Any) -> Any:
    return normforge.modulated_layer_norm(x, p.weight, p.bias)


def quantised(x: Any, p: Parameters) -> Any:
    return normforge.rmsnorm2d_fwd(x, p.weight, fquant="dynamic")[:3:2]


def quantised_by_groups(p: Parameters, x: Any, residual: Any) -> Any:
    total = (x + residual).flatten(0, -2)
    found = normforge.quantised_rms_norm(total, p.weight, group_size=32, out_dtype=torch.float8_e4m3fn)
    return found.y.float(), found.y_scale


def read_first(p: Parameters, x: Any, residual: Any) -> Any:
    total = x + residual
    return total * 2, norm(total, p.weight)


def between_kernels(p: Parameters, x: Any, other: Any) -> Any:
    # Inductor computes this apart, because mm reads it from memory.
    activated = torch.relu(x)
    return norm(activated + activated @ other)


def in_another_shape(p: Parameters, x: Any, residual: Any) -> Any:
    total = x + residual
    out = normforge.layernorm2d_fwd(total.view(-1, N), p.weight, p.bias, save_mv=True)
    return out.y, out.mean, out.rstd, total


def added_in_place(p: Parameters, x: Any, residual: Any) -> Any:
    residual.add_(x)
    return norm(residual)


def copied_out(p: Parameters, x: Any, residual: Any, out: Any) -> Any:
    total = x + residual
    y = norm(total)
    out.copy_(total)
    return y


def written_afterwards(p: Parameters, x: Any, residual: Any) -> Any:
    y = norm(x + residual)
    x.mul_(2)
    return y


def behind_a_long_kernel(p: Parameters, x: Any, residual: Any, other: Any) -> Any:
    total = x + residual
    return x @ other, norm(total)


SUMS = {
    "a sum that only the norm reads": Case(lambda p, x, r: norm(x + r, p.weight), alike(2)),
    "a sum that is returned": Case(lambda p, x, r: (s := x + r, norm(s)), alike(2)),
    "two norms of a sum": Case(lambda p, x, r: (s := x + r, norm(s, p.weight), norm(s, p.bias)), alike(2)),
    "a sum that is read before the norm": Case(read_first, alike(2)),
    "a sum in another shape": Case(in_another_shape, [rows(2, M, N), rows(2, M, N)]),
    "a sum of two dtypes": Case(lambda p, x, r: (s := x + r, norm(s)), [half(), rows()]),
    "the other way round": Case(lambda p, x, r: (s := r + x, norm(s)), [half(), rows()]),
    "16 bits that are widened first": Case(lambda p, x, r: (s := x.float() + r, norm(s)), [half(), rows()]),
    "rows that lie apart": Case(lambda p, x, r: (s := x[:, :N] + r, norm(s)), [rows(M, 3 * N), rows()]),
    "a quantised norm": Case(lambda p, x, r: quantised(x + r, p), alike(2)),
    "one row's sum": Case(lambda p, x, r: norm(x + r), [rows(N), rows(N)]),
    "two sums of two": Case(lambda p, x, r, a, b: (norm(x + r), norm(a + b)), alike(4), 2),
    "an operand that a kernel between has read": Case(between_kernels, [rows(), rows(N, N)]),
    "a bias": Case(lambda p, x, b: norm(x + b, p.weight), [rows(), rows(N)]),
    "a bias of another dtype": Case(lambda p, x, b: norm(x + b), [half(), rows(N)]),
    "a bias and a residual": Case(lambda p, x, b, r: (s := (x + b) + r, norm(s)), [rows(), rows(N), rows()]),
    "norms that are modulated": Case(lambda p, x, r: modulated(p, x + r), alike(2)),
    "a sum that is modulated and returned": Case(lambda p, x, r: (s := x + r, modulated(p, s)), alike(2)),
    "a norm quantised in groups": Case(quantised_by_groups, alike(2)),
    "x twice": Case(lambda p, x: (s := x + x, norm(s)), alike(1), 0),
    "views of one tensor": Case(lambda p, x: (s := x[0] + x[1], norm(s)), [rows(2, M, N)], 0),
    "a number": Case(lambda p, x: (s := x + 1.5, norm(s)), alike(1), 0),
    "alpha": Case(lambda p, x, r: (s := torch.add(x, r, alpha=2), norm(s)), alike(2), 0),
    "a row that is broadcast": Case(lambda p, x, r: (s := x + r, norm(s)), [rows(), rows(1, N)], 0),
    "a column that is broadcast": Case(lambda p, x, r: norm(x + r), [rows(), rows(M, 1)], 0),
    "rows that are broadcast": Case(lambda p, x, r: norm(x + r), [rows(2, M, N), rows(M, N)], 0),
    "a bias of a sum that is returned": Case(lambda p, x, b: (s := x + b, norm(s)), [rows(), rows(N)], 0),
    "an operand of the sum's own kernel": Case(lambda p, x, r: (s := x * 2 + r, norm(s)), alike(2), 0),
    "an operand of it that is returned too": Case(lambda p, x, r: (t := x * 2, s := t + r, norm(s)), alike(2), 0),
    "in place": Case(added_in_place, alike(2), 0),
    "an operand that is written to afterwards": Case(written_afterwards, alike(2), 0),
    "copied out": Case(copied_out, alike(3), 0),
    "behind a long kernel": Case(behind_a_long_kernel, [*alike(2), rows(N, N)], 0),
    "a weight of the sum": Case(lambda p, x, r: norm(s := x + r, s.sum(0)), alike(2), 0),
    "a transposed sum": Case(lambda p, x, r: (s := x + r, norm(s.contiguous())), [rows(N, M).t(), rows(N, M).t()], 0),
    "rows in another shape whose scales are of groups": Case(quantised_by_groups, [rows(2, M, N), rows(2, M, N)], 0),
    "other rows": Case(lambda p, x, r: (s := x + r, norm(s.view(-1, N // 2))), alike(2), 0),
    "two 16-bit types": Case(lambda p, x, r: (s := x + r, norm(s)), [half(), rows(dtype=torch.float16)], 0),
    "what is added to a residual already": Case(
        lambda p, x, r, other: norm(x + other, residual=r, fadd="pre_add"), alike(3), 0
    ),
    "what a bias is added to as well": Case(lambda p, x, r: (norm(s := x + r, x_bias=p.bias), s), alike(2), 0),
    "a residual that a gated norm does not take": Case(
        lambda p, x, r, gate: normforge.gated_rms_norm(x + r, gate, p.weight), alike(3), 0
    ),
    "a bias that a modulated norm does not take": Case(lambda p, x, b: modulated(p, x + b), [rows(), rows(N)], 0),
    "doubles": Case(lambda p, x, r: (s := x + r, norm(s.float())), [rows(dtype=torch.float64) for _ in "xr"], 0),
    "integers": Case(lambda p, x, r: (s := x + r, norm(s)), [rows(), torch.ones(M, N, dtype=torch.int32)], 0),
    "rounded elsewhere": Case(
        lambda p, x, r: (s := x + r, norm(s, p.weight, cast="before_weight")), [half(), rows()], 0
    ),
}


def rounded_before_the_weight(p: Parameters, x: Any) -> Any:
    return norm(x, p.weight, cast="before_weight", out_dtype=torch.float32).bfloat16()


CASTS = {
    "of fp32 rows": Case(lambda p, x: norm(x, p.weight).bfloat16(), alike(1)),
    "of fp32 y of 16-bit rows": Case(lambda p, x: norm(x, out_dtype=torch.float32).half(), [half()]),
    "of two readers": Case(lambda p, x: ((y := norm(x)).bfloat16() * 2, y.view(-1).bfloat16()), alike(1)),
    "of one of two readers": Case(lambda p, x: ((y := norm(x)).bfloat16(), y * 2), alike(1), 0),
    "to two types": Case(lambda p, x: ((y := norm(x)).bfloat16(), y.half()), alike(1), 0),
    "to fp32 of what is rounded": Case(lambda p, x: norm(x).float(), [half()], 0),
    "of what is rounded to other 16 bits": Case(lambda p, x: norm(x).half(), [half()], 0),
    "to integers": Case(lambda p, x: norm(x).int(), alike(1), 0),
    "rounded before the weight": Case(rounded_before_the_weight, alike(1), 0),
    "rounded before the weight to the same": Case(rounded_before_the_weight, [half()]),
}


def behind(p: Parameters, x: Any, residual: Any) -> Any:
    return residual + norm(x, p.weight)


def with_statistics(p: Parameters, x: Any, residual: Any) -> Any:
    out = normforge.layernorm2d_fwd(x, p.weight, p.bias, save_mv=True)
    return out.y.view(residual.shape) + residual, out.mean, out.rstd


def written_behind(p: Parameters, x: Any, residual: Any) -> Any:
    total = norm(x) + residual
    residual.mul_(2)
    return total


# A residual added behind a norm.
BEHIND = {
    "residual + y": Case(behind, alike(2)),
    "x again": Case(lambda p, x: norm(x) + x, alike(1)),
    "a residual of fp32": Case(behind, [half(), rows()]),
    "a residual of 16 bits": Case(behind, [rows(), half()]),
    "y that is widened first": Case(lambda p, x, r: norm(x).float() + r, [half(), rows()]),
    "two that are widened first": Case(lambda p, x, r: norm(x).float() + r.float(), [half(), half()]),
    "rounded before the weight": Case(lambda p, x, r: norm(x, p.weight, cast="before_weight") + r, [half(), half()]),
    "beside statistics": Case(with_statistics, [rows(4, N), rows(4, N)]),
    "in another shape": Case(with_statistics, [rows(4, N), rows(2, 2, N)]),
    "rows that lie apart": Case(lambda p, x, r: norm(x) + r[:, :N], [rows(), rows(M, 3 * N)]),
    "of a bias of x": Case(lambda p, x, r: norm(x, x_bias=p.bias) + r, alike(2)),
    "of two norms": Case(lambda p, x, r: norm(x) + norm(r, p.weight), alike(2)),
    "a residual that another kernel reads": Case(lambda p, x, r: norm(h := torch.relu(r) @ x) + h, [rows(N, N)] * 2),
    # The sum behind a norm goes first.
    "a sum before the norm": Case(lambda p, x, r, other: (s := x + r, behind(p, s, other)), alike(3), 1, 1),
    "y that is returned": Case(lambda p, x, r: ((y := norm(x)) + r, y), alike(2), 0),
    "a residual of the sum's own kernel": Case(lambda p, x, r: norm(x) + torch.relu(r), alike(2), 0),
    "a residual that is written to": Case(written_behind, alike(2), 0),
    "another rounding before the weight": Case(
        lambda p, x, r: norm(x, p.weight, cast="before_weight", out_dtype=torch.float16) + r, [half(), rows()], 0
    ),
    "what is quantised": Case(lambda p, x, r: quantised(x, p)[0] + r, alike(2), 0),
    "what is added to a residual already": Case(
        lambda p, x, r, other: norm(x, residual=r, fadd="pre_add") + other, alike(3), 0
    ),
    "an L2 norm": Case(lambda p, x, r: normforge.l2norm2d_fwd(x).y + r, alike(2), 0),
    "a modulated norm": Case(lambda p, x, r: modulated(p, x) + r, alike(2), 0),
}


def gradients(p: Parameters, dy: Any, x: Any, *wants: str, **options: Any) -> list[Any]:
    """The gradients of an RMSNorm that are asked for."""
    found = normforge.rmsnorm2d_bwd(dy, x, p.weight, rstd=p.rstd, wants=wants, **options)
    return [getattr(found, name) for name in wants]


def dx(p: Parameters, dy: Any, x: Any, **options: Any) -> Any:
    return normforge.layernorm2d_bwd(dy, x, p.weight, mean=p.mean, rstd=p.rstd, **options).dx


def beside(p: Parameters, dy: Any, x: Any, other: str, after: Callable[[Any], Any], **options: Any) -> Any:
    """What is made of dx, and another gradient of the same call."""
    found, beside = gradients(p, dy, x, "dx", other, **options)
    return after(found), beside


def dropped(p: Parameters, dy: Any, x: Any, rng: Any, after: Callable[[Any], Any]) -> Any:
    return beside(p, dy, x, "ddropped", after, dropout_p=0.5, dropout_rng=rng)


def modulated_dx(p: Parameters, dy: Any, x: Any) -> Any:
    statistics = (p.mean, p.rstd, None, None, None)
    operator = torch.ops.normforge.modulated_layer_norm_backward
    return operator(dy, x, p.weight, p.bias, None, None, None, *statistics, ["dx"])[0]


def of_a_gated_sum(p: Parameters, dy: Any, x: Any, other: Any) -> Any:
    given = (dy, x, p.weight, p.bias, p.weight, None, p.rstd, x, None, None, 0.0)
    dx, dgated = torch.ops.normforge.modulated_rms_norm_backward(*given, ["dx", "dgated"])
    return dx + other, dgated


def of_a_gated_norm(p: Parameters, dy: Any, x: Any, other: Any) -> Any:
    words = ("after_norm", "silu", 0.0, ["dx"])
    return torch.ops.normforge.gated_rms_norm_backward(dy, x, x, p.weight, p.rstd, *words)[0] + other


def made_of_dweight(p: Parameters, dy: Any, x: Any) -> Any:
    gradient, dweight = gradients(p, dy, x, "dx", "dweight")
    return gradient + dweight.expand(M, N).clone()


def made_by_a_long_kernel(p: Parameters, dy: Any, x: Any, g: Any) -> Any:
    gradient = dx(p, dy, x)
    return gradient + dy @ g


def written_before(p: Parameters, dy: Any, x: Any, g: Any) -> Any:
    gradient = dx(p, dy, x)
    dy.add_(1)
    return gradient + g


def sum_of_dx(p: Parameters, dy: Any, x: Any, g: Any) -> Any:
    return dx(p, dy, x) + g


RNG = torch.tensor([5, 6])
GRADIENTS = {
    "g + dx": Case(lambda p, dy, x, g: g + dx(p, dy, x), alike(3)),
    "dx + g": Case(sum_of_dx, alike(3)),
    "beside dweight": Case(lambda p, dy, x, g: beside(p, dy, x, "dweight", lambda d: g + d), alike(3)),
    "in another shape": Case(
        lambda p, dy, x, g: dx(p, dy, x).view(-1, 2, N) + g, [rows(4, N), rows(4, N), rows(2, 2, N)]
    ),
    "made between dx and the sum": Case(lambda p, dy, x, g: dx(p, dy, x) + torch.relu(g), alike(3)),
    "g of fp32, dx of 16 bits": Case(lambda p, dy, x, g: g + dx(p, dy, x), [half(), half(), rows()]),
    "two norms of a tensor": Case(lambda p, dy, x: dx(p, dy, x) + dx(p, x, x), alike(2)),
    "two norms, and a gradient first": Case(lambda p, dy, x, g: (g + dx(p, dy, x)) + dx(p, x, x), alike(3), 2),
    "two norms, and a gradient last": Case(lambda p, dy, x, g: g + (dx(p, dy, x) + dx(p, x, x)), alike(3), 2),
    "dx that is dy of the other too": Case(
        lambda p, dy, x, g: (dx(p, first := dx(p, dy, x), dy) + first) + g, alike(3), 1, 1
    ),
    "several gradients, added first": Case(lambda p, dy, x, g, h: (g + h) + dx(p, dy, x), alike(4), 1, 1),
    "of a modulated norm": Case(lambda p, dy, x, g: modulated_dx(p, dy, x) + g, alike(3)),
    "of a sum that a gate is a part of": Case(of_a_gated_sum, alike(3), 0),
    "of a gated norm": Case(of_a_gated_norm, alike(3), 0),
    "dx that is read besides": Case(lambda p, dy, x, g: ((d := dx(p, dy, x)) + g, d), alike(3), 0),
    "dx twice": Case(lambda p, dy, x: (d := dx(p, dy, x)) + d, alike(2), 0),
    "alpha": Case(lambda p, dy, x, g: torch.add(dx(p, dy, x), g, alpha=2), alike(3), 0),
    "a number": Case(lambda p, dy, x: dx(p, dy, x) + 1, alike(2), 0),
    "a row that is broadcast": Case(sum_of_dx, [*alike(2), rows(N)], 0),
    "dx that is broadcast": Case(sum_of_dx, [*alike(2), rows(2, M, N)], 0),
    "what comes of dweight": Case(made_of_dweight, alike(2), 0),
    "what a long kernel makes between": Case(made_by_a_long_kernel, [*alike(2), rows(N, N)], 0),
    "behind a write": Case(written_before, alike(3), 0),
    "accumulated in place": Case(lambda p, dy, x, g: g.copy_(g + dx(p, dy, x)), alike(3), 0),
    "dx whose sum is the gradient of a bias": Case(
        lambda p, dy, x, g: beside(p, dy, x, "dx_bias", lambda d: d + g, x_bias=p.bias), alike(3), 0
    ),
    "dx of which some is dropped": Case(
        lambda p, dy, x, g, rng: dropped(p, dy, x, rng, lambda d: d + g), [*alike(3), RNG], 0
    ),
    "doubles": Case(sum_of_dx, [*alike(2), rows(dtype=torch.float64)], 0),
    "integers": Case(sum_of_dx, [*alike(2), torch.ones(M, N, dtype=torch.int32)], 0),
    "a transposed gradient": Case(sum_of_dx, [*alike(2), rows(N, M).t()], 0),
    "what has a gradient already": Case(lambda p, dy, x, g, h: dx(p, dy, x, dresidual_out=h) + g, alike(4), 0),
    "dweight": Case(lambda p, dy, x, g: gradients(p, dy, x, "dweight")[0] + g, [*alike(2), rows(N)], 0),
}


def over_rows(p: Parameters, dy: Any, x: Any) -> Any:
    return (gradient := dx(p, dy, x)), gradient.sum(0)


def over_rows_of_two(p: Parameters, dy: Any, x: Any) -> Any:
    first, second = dx(p, dy, x), dx(p, x, dy)
    return first, second, first.sum(0, keepdim=True), second.sum(0)


def rounded_over_rows(p: Parameters, dy: Any, x: Any) -> Any:
    return (narrow := dx(p, dy, x).to(HALF)), narrow.sum(0)


def doubled_before(p: Parameters, dy: Any, x: Any) -> Any:
    gradient = dx(p, dy, x)
    gradient.mul_(2)
    return gradient.sum(0)


OVER_ROWS = {
    "a sum": Case(over_rows, alike(2)),
    "a sum in 16 bits": Case(over_rows, [half(), half()]),
    "of two norms": Case(over_rows_of_two, alike(2), 2),
    "beside dweight": Case(lambda p, dy, x: beside(p, dy, x, "dweight", lambda d: (d.sum(0), d)), alike(2)),
    "with the residual's gradient": Case(lambda p, dy, x, g: ((d := dx(p, dy, x) + g), d.sum(0)), alike(3)),
    "of dx that is rounded first": Case(rounded_over_rows, alike(2)),
    "of several dimensions": Case(
        lambda p, dy, x: ((d := dx(p, dy, x)), d.view(2, -1, N).sum((0, 1))), [rows(4, N), rows(4, N)]
    ),
    "over columns": Case(lambda p, dy, x: dx(p, dy, x).sum(1), alike(2), 0),
    "over everything": Case(lambda p, dy, x: dx(p, dy, x).sum(), alike(2), 0),
    "over some of the rows": Case(lambda p, dy, x: dx(p, dy, x)[1:].sum(0), alike(2), 0),
    "over a leading dimension of two": Case(lambda p, dy, x: dx(p, dy, x).view(1, M, N).sum(0), alike(2), 0),
    "of halves of rows": Case(lambda p, dy, x: dx(p, dy, x).view(2 * M, N // 2).sum(0), alike(2), 0),
    "in doubles": Case(lambda p, dy, x: dx(p, dy, x).sum(0, dtype=torch.float64), alike(2), 0),
    "of what is an integer first": Case(lambda p, dy, x: dx(p, dy, x).int().sum(0), alike(2), 0),
    "of what was written to": Case(doubled_before, alike(2), 0),
    "of what has the gradient of a bias": Case(
        lambda p, dy, x: beside(p, dy, x, "dx_bias", lambda d: d.sum(0), x_bias=p.bias), alike(2), 0
    ),
    "of what is dropped from": Case(
        lambda p, dy, x, rng: dropped(p, dy, x, rng, lambda d: d.sum(0)), [*alike(2), RNG], 0
    ),
    "dweight": Case(lambda p, dy, x: gradients(p, dy, x, "dweight")[0].view(1, N).sum(0), alike(2), 0),
}


def between(x: Any, residual: Any, weight: Any = None, **others: Any) -> tuple[Any, Any]:
    """Return the norm of the sum of a residual and a norm, and the sum."""
    total = residual + norm(x, **others)
    return norm(total, weight, **others), total


# A sum between two norms; what `join_post_add` joined is no addition any more.
BETWEEN = {
    "two norms": Case(lambda p, x, r: between(x, r, p.weight), alike(2), 1, 0),
    "of 16 bits": Case(lambda p, x, r: between(x, r, p.weight.to(HALF)), [half(), half()], 1, 0),
    "the sum alone in 16 bits": Case(lambda p, x, r: between(x, r), [half(), rows()], 0, 0),
    "of other epsilons": Case(lambda p, x, r: norm(r + norm(x), eps=1e-3), alike(2), 0, 0),
    "a sum in another shape": Case(lambda p, x, r: norm((r + norm(x)).view(-1, N // 2)), alike(2), 0, 0),
    "a sum that is written to": Case(lambda p, x, r: norm((r + norm(x)).mul_(2)), alike(2), 0, 0),
    "a quantised one": Case(lambda p, x, r: quantised(r + norm(x), p), alike(2), 1, 0),
}


def widened(cast: str) -> Callable[..., Any]:
    return lambda p, dy, x: dx(p, dy.float(), x, cast=cast)


WIDENINGS = {
    "for fp32 rows": Case(widened("after_weight"), [half(), rows()]),
    "for fp32 rows that are rounded before the weight": Case(widened("before_weight"), [half(), rows()], 0),
    "for 16-bit rows": Case(widened("after_weight"), [half(), half()]),
    "for 16-bit rows that are rounded before the weight": Case(widened("before_weight"), [half(), half()]),
}
# By rule, and how far a result may be off; in 16 bits a sum may be rounded elsewhere.
RULES: dict[str, tuple[dict[str, Case], float, float]] = {
    "join_sum": (SUMS, 1e-5, 1e-5),
    "join_cast": (CASTS, 0, 0),
    "join_post_add": (BEHIND, 1e-5, 1e-2),
    "join_next_norm": (BETWEEN, 1e-5, 2e-2),
    "join_gradient": (GRADIENTS, 1e-5, 1e-2),
    "join_column_sum": (OVER_ROWS, 1e-5, 1e-2),
    "join_widening": (WIDENINGS, 0, 0),
}


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule, (table, _, _) in RULES.items() for name in table])
def test_what_a_rule_joins(rule: str, name: str) -> None:
    table, *tolerances = RULES[rule]
    case = table[name]
    given = parameters(case.operands[0].shape[0] if rule in ("join_gradient", "join_column_sum") else M)
    function = Traced(case.call, given, *case.operands)
    mine, its = ([operand.clone() for operand in case.operands] for _ in range(2))
    made, expected = (
        torch.utils._pytree.tree_leaves(run(given, *on)) for run, on in ((function, mine), (case.call, its))
    )
    tolerance = tolerances[any(each.dtype is HALF for each in (*case.operands, *expected))]
    torch.testing.assert_close(made, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)
    assert [each.stride() for each in made] == [each.stride() for each in expected]
    assert function.applied[rule] == case.joined
    # A sum over rows may be over what another rule made, and a norm may follow it.
    assert rule in ("join_column_sum", "join_next_norm") or sum(function.applied.values()) == case.joined
    if case.joined:
        assert function.count(ADD) == case.left
    sums = function.applied["join_column_sum"]
    # One row of zeros for all.
    assert function.count("aten.full") == bool(sums)
    assert not (sums and function.count("aten.sum"))


def test_a_bias_before_a_norm_and_a_residual_behind_join() -> None:
    operands = [rows(), rows(N), rows()]

    def call(x: Any, bias: Any, residual: Any) -> Any:
        return residual + norm(x + bias)

    function = Traced(call, *operands)
    torch.testing.assert_close(function(*operands), call(*operands), rtol=1e-5, atol=1e-5)
    assert (function.applied["join_post_add"], function.applied["join_sum"], function.count(ADD)) == (1, 1, 0)


def test_a_sum_behind_a_norm_is_rounded_once() -> None:
    """To the nearest of 16 bits, where a norm that is rounded, and then a sum, are off in some places."""
    x = torch.linspace(-1, 2, M * N, dtype=HALF).view(M, N)
    residual = x.flip(1) * 0.7

    def call(x: Any, residual: Any) -> Any:
        return residual + norm(x, eps=0.0)

    wide = x.double()
    exact = (residual + wide / wide.square().mean(-1, keepdim=True).sqrt()).to(HALF)
    assert torch.equal(Traced(call, x, residual)(x, residual), exact)
    assert not torch.equal(call(x, residual), exact)

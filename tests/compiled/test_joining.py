"""What joins a norm in a graph and what does not, each held against the same calls without a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

import normforge

from .graphs import ADD, Traced

M, N = 3, 16
HALF = torch.bfloat16


def rows(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(size or (M, N)), dtype=dtype)


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
    """A row of joining.yaml, whose head says what each value is."""

    call: str
    operands: str
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


def with_statistics(p: Parameters, x: Any, residual: Any) -> Any:
    out = normforge.layernorm2d_fwd(x, p.weight, p.bias, save_mv=True)
    return out.y.view(residual.shape) + residual, out.mean, out.rstd


def written_behind(p: Parameters, x: Any, residual: Any) -> Any:
    total = norm(x) + residual
    residual.mul_(2)
    return total


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


def written_before(p: Parameters, dy: Any, x: Any, g: Any) -> Any:
    gradient = dx(p, dy, x)
    dy.add_(1)
    return gradient + g


RNG = torch.tensor([5, 6])


def doubled_before(p: Parameters, dy: Any, x: Any) -> Any:
    gradient = dx(p, dy, x)
    gradient.mul_(2)
    return gradient.sum(0)


def between(x: Any, residual: Any, weight: Any = None, **others: Any) -> tuple[Any, Any]:
    """Return the norm of the sum of a residual and a norm, and the sum."""
    total = residual + norm(x, **others)
    return norm(total, weight, **others), total


OF_ROWS, OF_GRADIENTS = ("x", "r", "a", "b"), ("dy", "x", "g", "h")
# By rule: the names of operands, and how far a result may be off; in 16 bits a sum may be rounded elsewhere.
RULES: dict[str, tuple[tuple[str, ...], float, float]] = {
    "join_sum": (OF_ROWS, 1e-5, 1e-5),
    "join_cast": (OF_ROWS, 0, 0),
    "join_post_add": (OF_ROWS, 1e-5, 1e-2),
    "join_next_norm": (OF_ROWS, 1e-5, 2e-2),
    "join_gradient": (OF_GRADIENTS, 1e-5, 1e-2),
    "join_column_sum": (OF_GRADIENTS, 1e-5, 1e-2),
    "join_widening": (OF_GRADIENTS, 0, 0),
}
TABLE: dict[str, dict[str, tuple[Any, ...]]] = yaml.safe_load(Path(__file__).with_name("joining.yaml").read_text())


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule, table in TABLE.items() for name in table])
def test_what_a_rule_joins(rule: str, name: str) -> None:
    names, *tolerances = RULES[rule]
    case = Case(*TABLE[rule][name])
    operands = eval(case.operands)
    call = eval(f"lambda {', '.join(('p', *names[: len(operands)]))}: {case.call}")
    given = parameters(operands[0].shape[0] if rule in ("join_gradient", "join_column_sum") else M)
    function = Traced(call, given, *operands)
    mine, its = ([operand.clone() for operand in operands] for _ in range(2))
    made, expected = (torch.utils._pytree.tree_leaves(run(given, *on)) for run, on in ((function, mine), (call, its)))
    tolerance = tolerances[any(each.dtype is HALF for each in (*operands, *expected))]
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

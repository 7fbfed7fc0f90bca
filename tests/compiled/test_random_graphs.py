"""Random small graphs of additions, norms, views, casts and what stands between: rewritten, they compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import normforge
from normforge.compiled.patterns import is_tensor

from ..properties.problems import Choose
from ..properties.profile import examples
from ..thorough import THOROUGH
from .graphs import Traced

M, N = 2, 16
DTYPES = (torch.float32, torch.bfloat16)


Step = Callable[[Choose, "Pool"], Any]


class Pool(list[torch.Tensor]):
    """The rows that there are, what norms are given beside them, and sums over rows, which are results and no more.

    Of a sum that nearly cancels another kernel's rounding would be most of what is made of it.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        *rows, self.weight, self.bias, self.rstd = inputs
        self.sums: list[torch.Tensor] = []
        super().__init__(rows)


def _add(choose: Choose, pool: Pool) -> None:
    first = choose(pool)
    alike = [each for each in pool if each.shape == first.shape]
    pool.append(torch.add(first, choose(alike), alpha=choose((1, 1, 1, 2))))


def _norm(choose: Choose, pool: Pool, x: torch.Tensor | None = None) -> None:
    x = choose(pool) if x is None else x
    weight = choose((None, pool.weight, pool.bias))
    if choose((True, False, False)):
        # Norms that take no bias of x, and of the two the first alone takes a residual.
        dtype = choose((None, *DTYPES))
        if choose((True, False)):
            y = normforge.modulated_rmsnorm2d_fwd(x, pool.weight, pool.bias, weight=weight, out_dtype=dtype).y
        else:
            y = normforge.gated_rmsnorm2d_fwd(x, x, weight, out_dtype=dtype).y
        pool.append(y)
        return
    options: dict[str, Any] = {"cast": choose(("after_weight", "before_weight")), "save_mv": True}
    options["out_dtype"] = choose((None, *DTYPES))
    function: Any = choose((normforge.rmsnorm2d_fwd, normforge.layernorm2d_fwd))
    pool.append(function(x, weight, **options).y)


def _backward(choose: Choose, pool: Pool) -> None:
    x = choose(pool)
    alike = [each for each in pool if each.shape == x.shape]
    wants = choose((("dx",), ("dx", "dweight")))
    given: dict[str, Any] = {"rstd": pool.rstd.view(x.shape[:-1]), "wants": wants, "dx_dtype": choose((None, *DTYPES))}
    dy = choose(alike)
    dy = choose((dy, dy.bfloat16().float()))
    if choose((True, False, False)):
        modulation = (pool.weight, pool.bias, None, None)
        others = (given["rstd"], None, None, given["dx_dtype"], 0.0)
        pool.append(torch.ops.normforge.modulated_rms_norm_backward(dy, x, *modulation, *others, ["dx"])[0])
        return
    out = normforge.rmsnorm2d_bwd(dy, x, pool.weight, **given)
    assert out.dx is not None
    pool.append(out.dx)
    if out.dweight is not None:
        pool.insert(0, out.dweight.expand(M, N).clone())


def _norm_of_a_sum(choose: Choose, pool: Pool) -> None:
    _add(choose, pool)
    total = pool[-1]
    if choose((True, False, False)):
        STEPS[choose(list(STEPS))](choose, pool)
    _norm(choose, pool, choose((total, total, total.view(-1, N))))


def _cast_of_a_norm(choose: Choose, pool: Pool) -> None:
    _norm(choose, pool)
    y = pool[-1] if choose((True, False, False)) else pool.pop()
    pool.append(choose((y, y.view(1, M, N))).to(choose(DTYPES)).view(M, N))


def _sum_with(compute: Step, choose: Choose, pool: Pool) -> None:
    compute(choose, pool)
    result = pool.pop()
    if choose((True, False, False)):
        STEPS[choose(list(STEPS))](choose, pool)
    other = choose([each for each in pool if each.numel() == result.numel()])
    pool.append(result.view(other.shape) + other)


def _sum_between_norms(choose: Choose, pool: Pool) -> None:
    function: Any = choose((normforge.rmsnorm2d_fwd, normforge.layernorm2d_fwd))
    options: dict[str, Any] = {"cast": choose(("after_weight", "before_weight")), "save_mv": True}
    x = choose(pool)
    first = function(x, choose((None, pool.weight)), **options)
    pool.append(first.y + choose([each for each in pool if each.shape == x.shape]))
    second = function(pool[-1], choose((None, pool.bias)), **options)
    if choose((True, False, False)):
        STEPS[choose(list(STEPS))](choose, pool)
    pool.append(second.y)
    statistics = (first.mean, first.rstd, second.mean, second.rstd)
    pool.sums += [each for each in statistics if each is not None and choose((True, False))]


def _over_rows(choose: Choose, pool: Pool) -> None:
    _backward(choose, pool)
    gradient = pool[-1]
    if choose((True, False)):
        gradient = choose((gradient.view(1, M, N), gradient.view(-1, 1, N), gradient.to(choose(DTYPES))))
    if choose((True, False, False)):
        STEPS[choose(list(STEPS))](choose, pool)
    leading = [*range(gradient.dim() - 1)]
    pool.sums.append(gradient.sum(choose((leading, leading, [0]))))


def _kernel(choose: Choose, pool: Pool) -> None:
    x = choose(pool)
    pool.append(x @ pool.weight.to(x.dtype).expand(N, N))


STEPS: dict[str, Step] = {
    "add": _add,
    "norm": _norm,
    "backward": _backward,
    "kernel": _kernel,
    "bias": lambda choose, pool: pool.append(choose(pool) + pool.bias),
    "number": lambda choose, pool: pool.append(choose(pool) + 0.5),
    "activation": lambda choose, pool: pool.append(torch.relu(choose(pool))),
    "cast": lambda choose, pool: pool.append(choose(pool).to(choose(DTYPES))),
    "shape": lambda choose, pool: pool.append(choose(pool).reshape(choose(((M, N), (1, M, N), (M, 1, N))))),
    "in place": lambda choose, pool: choose(pool).mul_(0.5),
}
# What something may join comes more often.
JOINED: dict[str, Step] = {
    "norm of a sum": _norm_of_a_sum,
    "cast of a norm": _cast_of_a_norm,
    "sum of gradients": partial(_sum_with, _backward),
    "sum behind a norm": partial(_sum_with, _norm),
    "sum between norms": _sum_between_norms,
    "over rows": _over_rows,
}
STEPS |= JOINED
WORDS = (*STEPS, *[*JOINED] * 5)


@THOROUGH
def test_random_graphs() -> None:
    joined: Counter[str] = Counter()

    @examples(100)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
            # The same choices in a trace and out of it.
            choose, pool = Random(seed).choice, Pool(inputs)
            for _ in range(choose(range(2, 9))):
                STEPS[choose(WORDS)](choose, pool)
            return [pool[-1], *(each for each in pool if choose((True, False, False))), *pool.sums]

        rows = torch.randn(4, M, N).unbind()
        vectors = torch.linspace(0.5, 1.5, N), torch.linspace(-1, 1, N), torch.linspace(1, 2, M)
        inputs = [*rows[:3], rows[3].bfloat16(), *vectors]
        expected = call(*(each.clone() for each in inputs))
        function = Traced(call, *inputs)
        actual = function(*(each.clone() for each in inputs))
        for a, b in zip(actual, expected, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            half = any(node.meta["val"].dtype == torch.bfloat16 for node in function.graph.nodes if is_tensor(node))
            assert (a - b).abs().max() <= (6e-2 if half else 1e-5) * max(1.0, float(b.abs().max()))
        joined.update(function.applied)

    run()
    assert joined.total() > 60
    assert min(joined.values()) > 0

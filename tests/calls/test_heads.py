"""Rows on two and three strides: heads of a packed qkv, and gradients that attention leaves transposed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import profiler

import normforge
from normforge import errors
from normforge.calls.row_layout import extent_of, row_stride
from normforge.families.public import rmsnorm2d_bwd
from normforge.kernels.strides import RowWalk, row_alignment

from ..calling import FORWARD, LENGTHS, ORACLE, agree, check_backward, each_norm, there
from ..thorough import THOROUGH

TOKENS, QUERIES, KEYS = 2, 4, 2

# Lengths of heads: those that models have, and one of which no row starts where a vector does.
each_head = pytest.mark.parametrize("n", [128, 99, pytest.param(64, marks=THOROUGH), pytest.param(256, marks=THOROUGH)])


def packed(n: int, tokens: int = TOKENS, queries: int = QUERIES) -> torch.Tensor:
    """Queries of each token, in one row with keys and values, which are NaN."""
    memory = torch.full((tokens, (queries + 2 * KEYS) * n), float("nan"))
    return memory[:, : queries * n].view(tokens, queries, n).copy_(torch.randn(tokens, queries, n))


def check_gradients(norm: str, x: torch.Tensor, dy: torch.Tensor, dresidual_out: torch.Tensor | None) -> None:
    """Run a forward and a backward call, and hold every gradient against the oracle."""
    saved = FORWARD[norm](x, save_mv=True)
    statistics = {"mean": saved.mean, "rstd": saved.rstd} if norm == "layer" else {"rstd": saved.rstd}
    given = {"weight": torch.randn(x.shape[-1]), **statistics, "dresidual_out": dresidual_out}
    wants = ("dx", "dweight", "dbias") if norm == "layer" else ("dx", "dweight")
    assert there(check_backward(norm, dy=dy, x=x, **given, wants=wants).dx).is_contiguous()


@each_head
@each_norm
def test_gradients_of_heads(norm: str, n: int) -> None:
    """The rows of x and the gradients that arrive lie each otherwise: packed, and transposed as attention has them."""
    dy = torch.randn(QUERIES, TOKENS, n).transpose(0, 1)
    check_gradients(norm, packed(n), dy, packed(n, queries=QUERIES + 1)[:, 1:])


@pytest.mark.parametrize("n", [LENGTHS["one_pass"], pytest.param(LENGTHS["two_pass"], marks=THOROUGH)])
def test_gradients_of_sums_arrive_on_heads_of_long_rows(n: int) -> None:
    """Rows that a program takes one after another: the interpreter counts them by Python's own numbers."""
    check_gradients("rms", packed(n, queries=2), torch.randn(TOKENS, 2, n), packed(n, queries=3)[:, 1:])


def _within(size: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers within memory of some size, whose other elements are NaN."""
    view = torch.full(size, float("nan"))[tuple(slice(length) for length in shape)]
    return view.copy_(torch.randn(shape))


# Rows of n elements, with how many strides they have.
LAYOUTS: dict[str, tuple[Callable[[int], torch.Tensor], int]] = {
    "heads": (lambda n: packed(n), 2),
    "every other head": (lambda n: packed(n)[:, ::2], 2),
    "heads with gaps": (lambda n: _within((2, 4, n + 3), (2, 3, n)), 2),
    "transposed": (lambda n: torch.randn(3, 2, n).transpose(0, 1), 2),
    "batches of heads": (lambda n: packed(n, 4, 2).view(2, 2, 2, n), 2),
    "transposed in batches": (lambda n: torch.randn(2, 3, 2, n).transpose(1, 2), 3),
    "gaps everywhere": (lambda n: _within((3, 4, 3, n + 1), (2, 3, 2, n)), 3),
    "reversed": (lambda n: torch.randn(2, 3, 2, n).permute(2, 1, 0, 3), 3),
    "tokens expanded": (lambda n: torch.randn(3, n).expand(2, 3, n), 2),
    "heads expanded": (lambda n: torch.randn(2, 1, n).expand(2, 3, n), 2),
    "one head": (lambda n: packed(n)[:, :1], 1),
    "one token": (lambda n: packed(n, 1), 1),
    "one token, every other head": (lambda n: packed(n, 1)[:, ::2], 1),
    "one of either": (lambda n: packed(n, 1, 1), 1),
    "all heads": (lambda n: torch.randn(2, 3 * n).view(2, 3, n), 1),
}
# Each of short rows; of each pipeline some.
LONG = ("heads", "transposed in batches")
CASES = [
    pytest.param(n, layout, id=f"{name}-{layout.replace(' ', '_')}", marks=[] if name == "short" else [THOROUGH])
    for name, n in {"short": 24, **LENGTHS}.items()
    for layout in (LAYOUTS if name == "short" else LONG)
]


@pytest.mark.parametrize(("n", "layout"), CASES)
def test_layouts(n: int, layout: str) -> None:
    made, strides = LAYOUTS[layout]
    x = made(n)
    found = row_stride("x", x)
    assert (len(found.strides) if isinstance(found, RowWalk) else 1) == strides
    expected = ORACLE["rms"](x, residual=x, fadd="pre_add_store", save_mv=True)
    agree(FORWARD["rms"](x, residual=x, fadd="pre_add_store", save_mv=True), expected)
    check_gradients("layer", torch.randn(x.shape), x, None)


@pytest.mark.parametrize("m", [9, *[pytest.param(m, marks=THOROUGH) for m in (1, 7, 8, 33)]])
def test_any_number_of_tokens(m: int) -> None:
    """Programs take 16 rows of this length each, and 3 heads do not divide that."""
    x = packed(5, m, 3)
    agree(FORWARD["layer"](x, save_mv=True), ORACLE["layer"](x, save_mv=True))


def test_more_strides_are_copied_once_or_refused() -> None:
    """The functional API copies what no kernel walks, once each way; the others say what to do."""
    x, dy = (torch.randn(3, 3, 3, 3, 32)[:2, :2, :2, :2] for _ in range(2))
    with pytest.raises(errors.LayoutError, match="the leading dimensions of dy"):
        rmsnorm2d_bwd(dy, torch.randn(x.shape), rstd=torch.ones(x.shape[:-1]))
    leaf = x.detach().requires_grad_()
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile:
        y = normforge.rms_norm(leaf, (32,), eps=1e-6)
    copies = ("aten::clone", "aten::_to_copy")
    assert [event.count for event in profile.key_averages() if event.key in copies] == [1]
    torch.testing.assert_close(y.detach(), torch.nn.functional.rms_norm(x, (32,), eps=1e-6))
    contiguous = x.contiguous().requires_grad_()
    found = torch.autograd.grad(y, leaf, dy)
    expected = torch.autograd.grad(torch.nn.functional.rms_norm(contiguous, (32,), eps=1e-6), contiguous, dy)
    torch.testing.assert_close(found, expected)


def test_known_calls_look_whether_places_among_heads_overlap(checked: list[tuple[int, ...]]) -> None:
    """Once such a call is known by its layout, addresses alone tell a good place from a bad one."""
    n = 36
    memory = torch.randn(TOKENS, 9 * n)
    view = memory.view(TOKENS, 9, n)
    normforge.rmsnorm2d_fwd(view[:, :4], out=view[:, 4:8])
    good = view[:, 5:9]
    expected = ORACLE["rms"](view[:, 1:5])
    agree(normforge.rmsnorm2d_fwd(view[:, 1:5], out=good), expected)
    assert len(checked) == 1
    with pytest.raises(errors.LayoutError, match="out overlaps x in memory"):
        normforge.rmsnorm2d_fwd(view[:, :4], out=view[:, 3:7])


@pytest.mark.parametrize("every", [2, 3, 5, 6, 7, 31, 32, 33, 48, 127, 1000, 2**16 + 1, 2**29, 2**30 - 1])
def test_the_reciprocal_is_exact_for_all_rows_that_an_i32_counts(every: int) -> None:
    """Where quotients change, and at random; by the integers of the kernel."""
    _, divisor, multiplier, shift, _ = RowWalk((0, 1), (every,)).arguments
    assert divisor == every
    assert multiplier < 2**32
    most = 2**31 - 1
    rows = {at for k in (1, 2, 3, most // every // 2, most // every) for at in (k * every - 1, k * every)} | {0, most}
    rows |= {int(at) for at in torch.randint(0, most, (1000,))}
    assert all(((row * multiplier) >> 32) >> shift == row // every for row in rows if row <= most)


def test_arguments_of_a_walk_lead_to_every_row() -> None:
    walk = RowWalk((100, 7, 13), (3, 4))
    stride, *groups = walk.arguments
    for row in range(24):
        at = row * stride + sum(row // every * jump for every, jump in zip(groups[::4], groups[3::4], strict=True))
        assert at == row // 12 * 100 + row // 4 % 3 * 7 + row % 4 * 13
    assert walk.rows == 12
    assert walk.reach == 2 * 7 + 3 * 13
    assert walk.types("i64")[1::4] == ("i64", "i64")
    assert RowWalk((1, 2**33), (5,)).types("i32") == ("i64", "i32", "i64", "i32", "i64")


def test_every_stride_counts_for_alignment() -> None:
    """A vector may start where all strides let rows start at one, and nowhere else."""
    assert row_alignment(RowWalk((24, 16), (3,)), 32) == 8
    assert row_alignment(RowWalk((16, 24), (3,)), 32) == 8
    assert row_alignment(RowWalk((48, 32, 5), (3, 2))) == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.replace(" ", "_"))
def test_extents_hold_every_row(layout: str) -> None:
    """Known calls tell by a range of bytes what lies apart: it reaches the last row of any number of tokens."""
    x = LAYOUTS[layout][0](9)
    row, step = extent_of(row_stride("x", x), 9, x.element_size())
    for tokens in range(1, len(x) + 1):
        part = x[:tokens]
        sizes = zip(part.shape, part.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sizes) + 1
        assert row + step * (part[..., 0].numel() - 1) >= last * x.element_size()

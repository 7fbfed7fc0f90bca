"""L2 norms, with eps added to the squares or clamped at eps: statistics, hard rows, graphs, and what they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.codegen import values as words
from normforge.codegen.model import Mode
from normforge.codegen.tiling import class_of
from normforge.codegen.values import Direction, DType, Norm
from normforge.errors import IllegalCombinationError
from normforge.tools.compare import TOLERANCES

from ..calling import FLOATS, same_bits, table_at

EPS = 0.5

each_norm = pytest.mark.parametrize("norm", [Norm.L2, Norm.L2_CLAMPED], ids=lambda norm: norm.value)


def public(norm: Norm, suffix: str = "") -> Any:
    """A function of a norm: the differentiable one, or that with a suffix."""
    return getattr(normforge, norm.row.stem + suffix if suffix else norm.row.function)


def agree(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Fail unless a tensor is what it should be, rounded once."""
    assert actual is not None
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCES[actual.dtype].rtol, atol=2e-6)


def exact(norm: Norm, x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """The definition, in fp64 and by other operations than kernels and oracle use."""
    wide = x.double()
    if norm is Norm.L2_CLAMPED:
        return torch.nn.functional.normalize(wide, dim=-1, eps=eps)
    return wide / torch.sqrt(wide.square().sum(-1, keepdim=True) + eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each_norm
def test_a_row_has_one_statistic_which_tells_whether_it_was_clamped(norm: Norm, dtype: torch.dtype) -> None:
    """Of rows of which one is zeros and one is a little shorter than eps."""
    x = torch.randn(5, 40)
    x[1] = 0.0
    x[2] *= 0.8 * EPS / x[2].norm()
    x, dy = x.to(dtype), torch.randn(5, 40).to(dtype)
    output = public(norm, "2d_fwd")(x, eps=EPS, save_mv=True)
    agree(output.y, exact(norm, x))
    assert output.mean is None
    squares = x.double().square().sum(-1)
    clamped = torch.where(squares.sqrt() < EPS, -1 / EPS, squares.rsqrt())
    agree(output.rstd, clamped if norm is Norm.L2_CLAMPED else (squares + EPS).rsqrt())
    y = public(norm)(x.requires_grad_(), None, EPS)
    assert same_bits(y, output.y)
    (wanted,) = torch.autograd.grad(exact(norm, x), x, dy.double())
    agree(torch.autograd.grad(y, x, dy)[0], wanted.double())


@pytest.mark.parametrize("value", [0.0, 1e-20, 1e18])
@each_norm
def test_rows_of_any_size(norm: Norm, value: float) -> None:
    x = torch.full((2, 40), value)
    agree(public(norm)(x, eps=1e-6), exact(norm, x, 1e-6))


def test_a_nan_is_not_clamped() -> None:
    x = torch.randn(3, 40)
    x[1, 0] = float("nan")
    assert normforge.normalize(x).isnan().all(-1).tolist() == [False, True, False]


BESIDE: dict[str, dict[str, Any]] = table_at(Path(__file__).with_name("l2_norm.yaml"))


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

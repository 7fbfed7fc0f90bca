"""Modulated norms: rows that are read where they are, which backward passes are kernels, and what is refused."""

from __future__ import annotations

import pytest
import torch

import normforge
from normforge.calls import road
from proving.cases import Case, cases, check, close, doubled, formula, operands

from ..calling import each_device
from .oracle import taken


@each_device
@pytest.mark.parametrize("n", [100, 600, pytest.param(33000, marks=pytest.mark.thorough)])
def test_chunks_of_one_tensor_are_read_where_they_are(n: int, device: str) -> None:
    """As DiT's modulation leaves them, and views of wider rows; nothing is copied, and each pipeline has such rows."""
    six = torch.randn(2, 6 * n, device=device)
    shift, scale, gate = six.chunk(6, -1)[:3]
    x, residual = torch.randn(2, 2, 2 * n, device=device).chunk(2, -1)
    given = {"x": x, "scale": scale, "shift": shift, "gate": gate, "residual": residual}
    (case,) = cases("modulated", vary=(), without=("weight", "bias"))
    rows = road.as_operands((*given.values(), None, None), 1)
    assert all(row is tensor for row, tensor in zip(rows, given.values(), strict=False))
    for output, its in zip(case.run(given), formula(case, doubled(given)), strict=True):
        close("output", output, its.detach(), 2e-5)


@each_device
@pytest.mark.parametrize("case", cases("modulated", vary=("norm",), shape=(3, 101, 24)), ids=str)
def test_many_short_rows(case: Case, device: str) -> None:
    """So many that a program takes several, and samples end within one."""
    check(case, operands(case, device))


def test_what_kernels_cannot_walk_is_copied() -> None:
    x, scale, shift = torch.randn(40, 3, 2).transpose(0, 2), torch.randn(40, 2).T, torch.randn(80)[::2]
    y = normforge.modulated_rms_norm(x, scale, shift)
    assert torch.equal(y, normforge.modulated_rms_norm(x.contiguous(), scale.contiguous(), shift.contiguous()))


@each_device
@pytest.mark.parametrize(
    ("kind", "rows", "kernels"), [("sample", 9, True), ("sample", 7, False), ("all", 3, True), ("row", 9, False)]
)
def test_which_backward_passes_are_kernels(
    kind: str, rows: int, kernels: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight rows a sample and more."""
    by_kernels = taken(monkeypatch)
    (case,) = cases("modulated", vary=(), norm="rms", sharing=(kind,) * 3, shape=(3, rows, 40))
    check(case, operands(case, device))
    assert by_kernels == [kernels]


def test_a_gradient_of_the_sum_alone() -> None:
    (case,) = cases("modulated", vary=())
    given = operands(case)
    check(case, given, [None, torch.ones_like(given["x"])])
    for name in ("scale", "weight"):
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(case.run(given)[1].sum(), given[name])

"""Gated calls of a known kind: what one of another kind is, and what is known of groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.calls import known, road
from normforge.calls.plan import Plan
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm
from normforge.families.gated import row as gated

from ..calling import each_device

pytestmark = pytest.mark.usefixtures("nothing_known")


N = 48


def exact(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None, group: int = N) -> torch.Tensor:
    rows = x.double().reshape(*x.shape[:-1], -1, group)
    y = (rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2)
    return (y if weight is None else y * weight.double()) * torch.nn.functional.silu(gate.double())


def holds(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None, group: int | None = None) -> None:
    y = normforge.gated_rms_norm(x, gate, weight, group_size=group)
    torch.testing.assert_close(y.double(), exact(x, gate, weight, group or N), rtol=1e-5, atol=1e-5)


@each_device
def test_calls_of_other_numbers_of_rows_are_known(device: str, checked: list[tuple[int, ...]]) -> None:
    weight = torch.randn(N, device=device)
    for m in (1, 5, 3, 400):
        wide = torch.randn(m, 2 * N, device=device)
        for _ in range(2):
            holds(torch.randn(m, N, device=device), torch.randn(m, N, device=device), weight)
            holds(torch.randn(m, N, device=device), wide[:, N:], weight)
    # One row's stride is its own.
    assert len(checked) <= 3


@each_device
def test_contiguous_calls_of_any_leading_sizes_are_known(device: str, checked: list[tuple[int, ...]]) -> None:
    for shape in ((2, 3, N), (4, 1, N), (3, 7, N)):
        holds(torch.randn(shape, device=device), torch.randn(shape, device=device))
    assert len(checked) == 1


@each_device
def test_groups_are_part_of_a_kind(device: str) -> None:
    for _ in range(2):
        for n, group in ((N, 16), (2 * N, 16), (N, 24), (N, N), (16, 16)):
            x, gate, weight = (torch.randn(size, n, device=device)[-5:] for size in (5, 5, 1))
            holds(x, gate, weight[0], group)
            holds(x, gate, None, group)
            holds(x[0], gate[0], weight[0], group)


def test_a_known_call_whose_groups_do_not_fit_is_refused() -> None:
    x, gate, weight = torch.randn(3, N), torch.randn(3, N), torch.randn(3, N)
    options = road.options_of(
        gated.CALLS, "rms", {"gating": "after_norm", "activation": "silu", "eps": 1e-6, "fquant": "none",
                             "out_dtype": None, "save_mv": False}
    )  # fmt: skip
    for _ in range(2):
        road.launched(gated.CALLS, (x, gate, weight, None), options)
    with pytest.raises(normforge.errors.ShapeError, match=r"weight has shape \(3, 48\) and x \(2, 48\)"):
        road.launched(gated.CALLS, (x[:2], gate[:2], weight, None), options)


def test_a_known_call_whose_gate_does_not_fit_is_refused() -> None:
    x = torch.randn(3, N)
    for _ in range(2):
        normforge.gated_rms_norm(x, torch.randn(3, N))
    for rows in (2, 4):
        with pytest.raises(normforge.errors.ShapeError, match="gate has shape"):
            normforge.gated_rms_norm(x, torch.randn(rows, N))
    with pytest.raises(normforge.errors.ConflictError):
        normforge.gated_rms_norm(x, x, eps=float("nan"))


@each_device
@pytest.mark.parametrize("wrong", range(4))
def test_an_operand_may_start_anywhere(wrong: int, device: str) -> None:
    def at(index: int, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        offset = 1 if index == wrong else 0
        return torch.randn(size + offset, device=device)[offset:].view(shape)

    for group in (None, 16):
        for _ in range(2):
            x, gate, weight = at(0, 3, N).requires_grad_(), at(1, 3, N).requires_grad_(), at(2, N).requires_grad_()
            y = normforge.gated_rms_norm(x, gate, weight, group_size=group)
            wanted = exact(x, gate, weight, group or N)
            torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
            dy = at(3, 3, N)
            found = torch.autograd.grad(y, (x, gate, weight), dy)
            for got, its in zip(found, torch.autograd.grad(wanted, (x, gate, weight), dy.double()), strict=True):
                torch.testing.assert_close(got, its, rtol=1e-4, atol=1e-4)


def test_a_call_of_today_asks_for_nothing_new() -> None:
    """Kernels of modes without a gate have no parameter of it."""
    x = torch.randn(3, N)
    normforge.layer_norm(x, (N,))
    (plan,) = known.all_plans()
    assert plan.mode == Mode(Norm.LAYER, DType.FP32, DType.FP32)
    assert not any("gate" in name for name in plan.prepared(3).launchers[0].kernel.arg_names)


@each_device
@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_kernels_of_calls_are_listed_before(norm: str, group: int | None, device: str) -> None:
    """`compile_keys` has what forward and backward calls of rows that adjoin launch."""
    function: Any = getattr(normforge, f"gated_{norm}_norm")
    leaves = [torch.randn(size, device=device, requires_grad=True) for size in ((8, N), (8, N), (N,), (N,))]
    leaves = leaves[: 4 if norm == "layer" else 3]
    torch.autograd.grad(function(*leaves, group_size=group).sum(), leaves, torch.ones((), device=device))
    plans = [plan for plan in known.all_plans() if isinstance(plan, Plan)]
    assert len(plans) == 2
    for plan in plans:
        listed = normforge.compile_keys(
            n=[group or N], modes=[plan.mode.name], arch="sm_90", dy_dtypes=[torch.float32], rows=["few"]
        )
        types = dict(plan.prepared(8 if group is None else 24).launchers[0].key.arguments)
        its = dict(listed[0].key.arguments)
        assert its.keys() == types.keys()
        names = [name for name in its if name.endswith(("_ptr", "_stride"))]
        assert {name: types[name] for name in names} == {name: its[name] for name in names}


@each_device
@pytest.mark.parametrize(("n", "rows", "block"), [(64, 8, 64), (33, 8, 64), (65, 4, 128), (3, 32, 16)])
def test_tiles_of_short_rows_are_no_wider_than_those(n: int, rows: int, block: int, device: str) -> None:
    """By the tiles of 128 columns, with 4 rows forward and 8 backward; the last tile has a few rows."""
    leaves = [torch.randn(size, device=device, requires_grad=True) for size in ((300, n), (300, n), (n,))]
    x, gate, weight = leaves
    y = normforge.gated_rms_norm(x, gate, weight)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = exact(wide[0], wide[1], wide[2], n)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, dy)
    for got, its in zip(found, torch.autograd.grad(wanted, wide, dy.double()), strict=True):
        torch.testing.assert_close(got.double(), its, rtol=1e-4, atol=1e-4)
    for plan in [plan for plan in known.all_plans() if isinstance(plan, Plan)]:
        constants = dict(plan.prepared(300).launchers[0].key.arguments)
        factor = 2 if plan.mode.is_backward else 1
        assert (constants["ROWS"], constants["BLOCK"]) == (rows * factor, block)

"""Modulated calls of a known kind: what one of another kind is, and which bits a row's result has."""

from __future__ import annotations

import pytest
import torch

import normforge
from normforge.calls import known
from normforge.calls.plan import Plan
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, Norm

from ..calling import each_device, same_bits

pytestmark = pytest.mark.usefixtures("nothing_known")


N = 48


def exact(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """What modulated LayerNorm of (B, T, N) rows is, each operand with a row for each of x's or for each sample."""
    h = torch.nn.functional.layer_norm(x.double(), (x.shape[-1],))
    scale, shift = (each if each.dim() != 2 else each.unsqueeze(1) for each in (scale.double(), shift.double()))
    return h * (1 + scale) + shift


@each_device
def test_calls_with_other_numbers_of_samples_and_rows_are_right(device: str, checked: list[tuple[int, ...]]) -> None:
    """Rows a sample are part of a plan; how many samples there are is not."""
    for samples, rows in ((2, 3), (5, 3), (2, 3), (2, 4), (1, 3), (1, 6), (3, 2), (6, 1), (2, 3)):
        x = torch.randn(samples, rows, N, device=device)
        shift, scale = torch.randn(samples, 2 * N, device=device).chunk(2, -1)
        torch.testing.assert_close(
            normforge.modulated_layer_norm(x, scale, shift).double(), exact(x, scale, shift), rtol=1e-5, atol=1e-5
        )
    # (5, 3) and the repeated calls are known; one sample's strides are its own.
    assert len(checked) <= 6


@each_device
def test_a_known_kind_has_the_same_way_of_sharing(device: str, checked: list[tuple[int, ...]]) -> None:
    x = torch.randn(4, 4, N, device=device)
    shapes = ((4, N), (4, 4, N), (N,))
    for first in shapes:
        for second in shapes:
            scale, shift = torch.randn(first, device=device), torch.randn(second, device=device)
            for _ in range(2):
                y = normforge.modulated_layer_norm(x, scale, shift)
                torch.testing.assert_close(y.double(), exact(x, scale, shift), rtol=1e-5, atol=1e-5)
    assert len(checked) == len(shapes) ** 2


def test_a_known_call_whose_samples_do_not_fit_is_refused() -> None:
    # Not one tensor for several operands, which is a kind of its own.
    x, scale, shift, gate, residual = torch.randn(2, 3, N), *torch.randn(3, 2, N), torch.randn(2, 3, N)
    for _ in range(2):
        normforge.modulated_layer_norm(x, scale, shift)
        normforge.modulated_layer_norm(x, scale, shift, gate=gate, residual=residual)
    for wrong in (torch.randn(3, N), torch.randn(1, N)):
        for given in ((wrong, shift), (scale, wrong)):
            with pytest.raises(normforge.errors.ShapeError):
                normforge.modulated_layer_norm(x, *given)
        with pytest.raises(normforge.errors.ShapeError):
            normforge.modulated_layer_norm(x, scale, shift, gate=wrong, residual=residual)
    with pytest.raises(normforge.errors.ConflictError):
        normforge.modulated_layer_norm(x, scale, shift, eps=float("nan"))


@each_device
@pytest.mark.parametrize("wrong", range(5))
def test_an_operand_may_start_anywhere(wrong: int, device: str) -> None:
    def at(index: int, *shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        offset = 1 if index == wrong else 0
        return torch.randn(size + offset, device=device)[offset:].view(shape)

    for _ in range(2):
        x, scale, shift, gate, residual = at(0, 2, 3, N), at(1, 2, N), at(2, 2, N), at(3, 2, N), at(4, 2, 3, N)
        y, total = normforge.modulated_layer_norm(x, scale, shift, gate=gate, residual=residual)
        s = x.double() * gate.double().unsqueeze(1) + residual.double()
        torch.testing.assert_close(total.double(), s, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(y.double(), exact(s, scale, shift), rtol=1e-5, atol=1e-5)


@each_device
def test_a_row_has_the_same_bits_whatever_it_shares_its_modulation_with(device: str) -> None:
    x, scale, shift = torch.randn(6, N, device=device), *torch.randn(2, N, device=device)
    for_all = normforge.modulated_layer_norm(x, scale, shift)
    of_each = normforge.modulated_layer_norm(x, scale.expand(6, N), shift.expand(6, N).contiguous())
    of_samples = normforge.modulated_layer_norm(x.view(2, 3, N), scale.expand(2, N), shift.expand(2, N).contiguous())
    alone = normforge.modulated_layer_norm(x[2], scale, shift)
    assert same_bits(for_all, of_each)
    assert same_bits(for_all, of_samples.view(6, N))
    assert same_bits(for_all[2], alone)


def test_a_call_of_today_asks_for_nothing_new() -> None:
    """Kernels of modes without modulation have no parameter of it."""
    x = torch.randn(3, N)
    normforge.layer_norm(x, (N,))
    (plan,) = known.all_plans()
    assert plan.mode == Mode(Norm.LAYER, DType.FP32, DType.FP32)
    assert not any("scale" in name or "shift" in name for name in plan.prepared(3).launchers[0].kernel.arg_names)


@each_device
def test_kernels_of_a_backward_pass_are_listed_before(device: str) -> None:
    """`compile_keys` has what a backward pass of rows that adjoin launches."""
    shape = (2, 8, N)
    leaves = [torch.randn(size, device=device, requires_grad=True) for size in (shape, (2, N), (2, N), (2, N), shape)]
    x, scale, shift, gate, residual = leaves
    y, total = normforge.modulated_layer_norm(x, scale, shift, gate=gate, residual=residual)
    torch.autograd.grad((y.sum() + total.sum()), leaves)
    (plan,) = [plan for plan in known.all_plans() if isinstance(plan, Plan) and plan.mode.is_backward]
    listed = normforge.compile_keys(
        n=[N], modes=[plan.mode.name], arch="sm_90", weight_dtypes=[None], dy_dtypes=[torch.float32]
    )
    types = dict(plan.prepared(16).launchers[0].key.arguments)
    names = [name for name, word in dict(listed[0].key.arguments).items() if isinstance(word, str)]
    assert {name: types[name] for name in names} == {name: dict(listed[0].key.arguments)[name] for name in names}


@pytest.mark.parametrize("misaligned", [(), ("scale",)])
def test_kernels_that_calls_take_are_listed_before(misaligned: tuple[str, ...]) -> None:
    """Of samples of several rows: `compile_keys` has what calls launch, one sample and several alike."""
    keys = normforge.compile_keys(
        n=[N], modes=["ln_fwd_bf16_xg_addst_mod"], arch="sm_90", weight_dtypes=[None], misaligned=[misaligned]
    )
    types = dict(keys[0].key.arguments)
    assert isinstance(types["gate_row_stride"], tuple)
    assert isinstance(types["scale_row_stride"], tuple)
    assert str(types["scale_ptr"]).endswith(":16") is (misaligned == ())
    assert types["weight_ptr"] is None

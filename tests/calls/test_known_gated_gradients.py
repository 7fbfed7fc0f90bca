"""Backward passes of gated norms whose tensors are like those of one before: launched without being looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.families.in_parts import InParts
from normforge.selection import dispatch

from ..calling import each_device
from .looked import Looked

ROWS, N = (3, 5), 48


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch, InParts, "gradients")


def operands(
    device: str,
    norm: str = "rms",
    *,
    rows: tuple[int, ...] = ROWS,
    dtype: torch.dtype = torch.float32,
    of_weight: torch.dtype = torch.float32,
    apart: bool = False,
) -> dict[str, torch.Tensor]:
    """Of a call: x and gate, which may be the halves of a wider tensor, and vectors."""
    generator = torch.Generator().manual_seed(len(rows) + rows[0])

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    x, gate = draw(*rows, 2 * N).chunk(2, dim=-1) if apart else (draw(*rows, N), draw(*rows, N))
    found = {"x": x, "gate": gate, "weight": draw(N).to(of_weight)}
    found |= {"bias": draw(N).to(of_weight)} if norm == "layer" else {}
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def gradients(
    given: dict[str, torch.Tensor], dy: torch.Tensor | None = None, due: tuple[str, ...] = (), **options: Any
) -> dict[str, torch.Tensor]:
    """Of a norm's operands, all or some."""
    norm = "layer" if "bias" in given else "rms"
    y = getattr(normforge, f"gated_{norm}_norm")(**given, **options)
    arrived = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y) if dy is None else dy
    names = due or tuple(given)
    return dict(zip(names, torch.autograd.grad(y, [given[name] for name in names], arrived), strict=True))


def exact(
    given: dict[str, torch.Tensor],
    dy: torch.Tensor | None = None,
    *,
    group_size: int = N,
    norm_before_gate: bool = True,
) -> dict[str, torch.Tensor]:
    """The same in fp64, by the formula."""
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
    x, factor = wide["x"], torch.nn.functional.silu(wide["gate"])
    s = (x if norm_before_gate else x * factor).view(*x.shape[:-1], -1, group_size)
    s = s - s.mean(-1, keepdim=True) if "bias" in given else s
    eps = 1e-5 if "bias" in given else 1e-6
    y = (s * (s.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * wide["weight"]
    y = y + wide["bias"] if "bias" in given else y
    y = y * factor if norm_before_gate else y
    arrived = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(given["x"].dtype) if dy is None else dy
    return dict(zip(wide, torch.autograd.grad(y, list(wide.values()), arrived.double()), strict=True))


def agree(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=tolerance, atol=tolerance, msg=name)


@each_device
@pytest.mark.parametrize("apart", [False, True], ids=["adjoining", "apart"])
@pytest.mark.parametrize("norm_before_gate", [True, False], ids=["norm-first", "gate-first"])
@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_second_backward_pass_is_known(
    norm: str, group_size: int | None, norm_before_gate: bool, apart: bool, device: str, looked: Looked
) -> None:
    given = operands(device, norm, apart=apart)
    first = gradients(given, group_size=group_size, norm_before_gate=norm_before_gate)
    assert looked.counts() == (1, 0)
    second = gradients(given, group_size=group_size, norm_before_gate=norm_before_gate)
    assert looked.counts() == (0, 1)
    agree(second, exact(given, group_size=group_size or N, norm_before_gate=norm_before_gate))
    assert all(torch.equal(gradient, first[name]) for name, gradient in second.items())


@each_device
@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("apart", [False, True], ids=["adjoining", "apart"])
def test_other_numbers_of_rows_are_known(apart: bool, group_size: int | None, device: str, looked: Looked) -> None:
    """The first dimension alone may be another."""
    gradients(operands(device, apart=apart), group_size=group_size)
    looked.counts()
    sizes = [(70, 5), (2, 5), (300, 5)] if apart else [(70, 5), (1, 5), (2, 5)]
    for rows in sizes:
        given = operands(device, rows=rows, apart=apart)
        agree(gradients(given, group_size=group_size), exact(given, group_size=group_size or N), 1e-3)
        assert looked.counts() == (0, 1), rows


@each_device
@pytest.mark.parametrize("group_size", [None, 16])
def test_rows_with_gaps_between_the_first_dimensions_are_another_kind(
    group_size: int | None, device: str, looked: Looked
) -> None:
    """Their strides do not follow from their sizes."""
    gradients(operands(device, rows=(4, 5)), group_size=group_size)
    looked.counts()
    given = operands(device, rows=(4, 5))
    given["x"] = torch.randn(8, 5, N, device=device)[::2].requires_grad_()
    agree(gradients(given, group_size=group_size), exact(given, group_size=group_size or N), 1e-3)
    assert looked.counts() == (1, 0)


@each_device
def test_no_rows_are_no_kernels(device: str, looked: Looked) -> None:
    gradients(operands(device, rows=(7,)))
    looked.counts()
    found = gradients(operands(device, rows=(0,)))
    assert found["x"].shape == (0, N)
    assert not found["weight"].any()


@each_device
def test_what_differs_is_looked_at(device: str, looked: Looked) -> None:
    gradients(operands(device))
    different: list[dict[str, Any]] = [
        {"dtype": torch.bfloat16},
        {"of_weight": torch.bfloat16},
        {"rows": (15,)},
        {"apart": True},
    ]
    for others in different:
        looked.counts()
        given = operands(device, **others)
        wide = others.get("dtype", torch.float32) is torch.float32
        agree(gradients(given), exact(given), 1e-2 if "of_weight" in others or not wide else 1e-4)
        assert looked.counts() == (1, 0), others


@each_device
def test_gradients_that_lie_otherwise_are_copied_and_then_known(device: str, looked: Looked) -> None:
    given = operands(device)
    gradients(given)
    looked.counts()
    arrived = {
        "transposed": torch.randn(N, *ROWS, device=device).movedim(0, -1),
        "expanded": torch.randn((), device=device).expand(*ROWS, N),
        "wider": torch.randn(*ROWS, 2 * N, device=device)[..., :N],
        "misaligned": torch.randn(ROWS[0] * ROWS[1] * N + 1, device=device)[1:].view(*ROWS, N),
        "misaligned again": torch.randn(ROWS[0] * ROWS[1] * N + 1, device=device)[1:].view(*ROWS, N),
    }
    counts = {}
    for name, dy in arrived.items():
        agree(gradients(given, dy), exact(given, dy))
        counts[name] = looked.counts()
    copied = dict.fromkeys(("transposed", "expanded"), (1, 1))
    assert counts == {**dict.fromkeys(arrived, (1, 0)), **copied, "misaligned again": (0, 1)}


@each_device
@pytest.mark.parametrize("due", [("x",), ("gate",), ("weight", "x")], ids=str)
def test_only_what_is_due_is_made(due: tuple[str, ...], device: str, looked: Looked) -> None:
    given = operands(device, "layer")
    everything = gradients(given)
    for name, tensor in given.items():
        tensor.requires_grad_(name in due)
    for _ in range(2):
        found = gradients(given, due=due)
        assert all(torch.equal(gradient, everything[name]) for name, gradient in found.items())
    assert looked.counts() == (2, 1)


@each_device
def test_a_weight_that_groups_share_is_added_up_each_time(device: str, looked: Looked) -> None:
    """Kernels leave a sum for each group of one vector that is passed for all."""
    function: Any = normforge.gated_layer_norm
    leaves = [torch.randn(size, device=device, requires_grad=True) for size in ((6, 3, 16), (6, 3, 16), (3, 16), (16,))]
    found = [torch.autograd.grad(function(*leaves).sum(), leaves) for _ in range(2)]
    assert looked.counts() == (2, 0)
    assert [gradient.shape for gradient in found[0]] == [leaf.shape for leaf in leaves]
    assert all(map(torch.equal, *found))


@each_device
def test_under_batch_invariance_calls_are_known_by_themselves(device: str, looked: Looked) -> None:
    dispatch.forget()
    gradients(operands(device))
    with normforge.batch_invariant():
        found = [gradients(operands(device)) for _ in range(2)]
    assert looked.counts() == (2, 1)
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())

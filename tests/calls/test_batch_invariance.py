"""Under batch invariance a row's results have the same bits in every batch, wherever it stands and lies."""

from typing import Any

import pytest
import torch

import normforge
from normforge.errors import ConflictError, InvarianceError, SettingError
from normforge.selection import invariance

from ..calling import in_threads, there
from ..thorough import THOROUGH
from .batches import CALLS, Call, assert_same, group, hold_for, hold_wherever_it_lies, rows, vector

each_call = pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=[] if name in ("quantised", "in_groups", "backward", "gated") else THOROUGH)
        for name, call in CALLS.items()
    ],
)

pytestmark = pytest.mark.usefixtures("invariant")

N = 131


@each_call
@pytest.mark.parametrize("n", [N, *[pytest.param(n, marks=THOROUGH) for n in (64, 1030)]])
def test_a_row_has_the_same_bits_in_every_batch(call: Call, n: int) -> None:
    """Tiles of several rows, rows in chunks that fill them or do not, and rows that no vector starts."""
    hold_for(call, rows(257, n), ((0, 1), (256, 257), (5, 7), (2, 5), (100, 107), *([(1, 257)] if n == N else [])))


# The last is the whole batch, which the others are held against.
MS = (1, 3, 7, 256, 257, 1000, 2100)


# Short rows, several to a tile, and the shortest that tiles for few and for many would add up otherwise.
EVERY_M = [(36, name) for name in CALLS] + [(129, name) for name in ("root_mean_square", "in_groups", "backward")]


@THOROUGH
@pytest.mark.parametrize(("n", "name"), EVERY_M)
def test_a_row_has_the_same_bits_for_every_m(n: int, name: str) -> None:
    """From a row on with which no tile of rows begins."""
    hold_for(CALLS[name], rows(MS[-1], n), [(5, 5 + m) for m in MS[:-1]])


@each_call
@pytest.mark.parametrize("n", [N, 128])
def test_a_row_has_the_same_bits_wherever_it_lies(call: Call, n: int) -> None:
    hold_wherever_it_lies(call, rows(8, n), beside=(5,), ahead=(1,))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(32, 2, 2), pytest.param((32, 30, 30), marks=THOROUGH)])
def test_a_sample_of_group_norm_has_the_same_bits_in_every_batch(shape: tuple[int, ...], channels_last: bool) -> None:
    """Of 288 groups and of a few, at an address that is a multiple of no vector."""
    x = torch.randn(18, *shape, generator=torch.Generator().manual_seed(5)) + 10.0
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)

    batch = group(x)
    moved = torch.empty(x[4:5].numel() + 1)[1:].as_strided(x[4:5].shape, x[4:5].stride()).copy_(x[4:5])
    for part, at in ((x[:1], slice(0, 1)), (x[7:9], slice(7, 9)), (moved, slice(4, 5))):
        assert_same(group(part), batch, at)


def test_outputs_that_lie_otherwise_are_written_where_they_are() -> None:
    """A kernel writes elsewhere then, and what it wrote is copied: into x itself, too."""
    n = 128
    x = rows(8, n)
    weight = vector(1, x)
    expected = normforge.rmsnorm2d_fwd(x, weight, residual=x, fadd="pre_add_store")
    place, total = torch.zeros(8 * n + 1)[1:].view(8, n), torch.zeros(8, n + 1)[:, :n]
    found = normforge.rmsnorm2d_fwd(x, weight, residual=x, fadd="pre_add_store", out=place, residual_out=total)
    assert found.y is place
    assert found.residual_out is total
    assert torch.equal(place, expected.y)
    assert torch.equal(total, there(expected.residual_out))
    own = torch.zeros(8 * n + 1)[1:].view(8, n).copy_(x)
    assert normforge.rmsnorm2d_fwd(own, weight, out=own).y is own
    assert torch.equal(own, normforge.rmsnorm2d_fwd(x, weight).y)


def test_modulated_rows_have_the_same_bits_in_every_batch() -> None:
    """Forward and backward; of samples of so few rows that torch's operators would compute gradients, none are."""
    x = rows(2 * 130, N).view(2, 130, N)
    scale, shift = (vector(seed, x).expand(2, N).contiguous() for seed in (4, 5))

    def both(x: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = normforge.modulated_layer_norm(leaf, scale[:samples], shift[:samples], eps=1e-6)
        return y.detach(), torch.autograd.grad(y, leaf, x.flip(-1))[0]

    for found, expected in zip(both(x[:1], 1), both(x, 2), strict=True):
        assert torch.equal(found, expected[:1])
    for found, expected in zip(both(x[:, :9], 2), both(x, 2), strict=True):
        assert torch.equal(found, expected[:, :9])
    with pytest.raises(InvarianceError, match="gradient"):
        both(x[:, :3], 2)


def test_a_backward_pass_is_as_its_forward_pass_was() -> None:
    """Wherever it runs: outside of the `with`, and in threads of autograd's own."""
    weight = vector(1, rows(1, N)).requires_grad_()

    def gradient(x: torch.Tensor, residual: bool) -> torch.Tensor:
        x = x.clone().requires_grad_()
        if residual:
            y, total = normforge.add_layer_norm(x, x.detach().flip(-1), weight)
        else:
            y, total = normforge.layer_norm(x, (N,), weight), None
        loss = (y * y.detach().flip(-1)).sum() + (0.0 if total is None else total.sum())
        with normforge.batch_invariant(False):
            in_threads(torch.Tensor.backward, [loss])
        return there(x.grad)

    x = rows(257, N)
    for residual in (False, True):
        # Twice: first, and then known.
        for _ in range(2):
            assert torch.equal(gradient(x, residual)[:9], gradient(x[:9], residual))


def test_what_torch_would_compute_is_refused() -> None:
    """Its operators promise no bits: of float64, in transforms, and for a gradient of a gradient."""
    x = rows(3, N)
    with pytest.raises(InvarianceError, match=r"torch\.float64 on cpu"):
        normforge.layer_norm(x.double(), (N,))
    with pytest.raises(InvarianceError, match=r"batch_invariant\(False\)"):
        torch.func.vmap(lambda row: normforge.rms_norm(row, (N,)))(x)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(normforge.rms_norm(leaf, (N,)).square().sum(), leaf, create_graph=True)
    with pytest.raises(InvarianceError, match="gradient"):
        torch.autograd.grad(first.sum(), leaf)
    assert normforge.layer_norm(torch.zeros(3, 0), (0,)).shape == (3, 0)


def test_words_are_checked() -> None:
    word: Any = "yes"
    with pytest.raises(ConflictError, match="True or False"):
        normforge.batch_invariant(word)


def test_the_environment_speaks_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_process", None)
    monkeypatch.setenv("NORMFORGE_BATCH_INVARIANT", "2")
    with pytest.raises(SettingError, match="set it to one of them"):
        invariance.by_default()
    monkeypatch.setenv("NORMFORGE_BATCH_INVARIANT", "1")
    monkeypatch.setattr(invariance, "anywhere", False)
    assert invariance.by_default()
    assert invariance.anywhere
    # Before the `with` of all these tests is left, which asks once more.
    monkeypatch.undo()

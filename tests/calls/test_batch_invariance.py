"""Under batch invariance a row's results have the same bits in every batch, wherever it stands and lies."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import normforge
from normforge.errors import ConflictError, InvarianceError, SettingError
from normforge.selection import invariance
from tests.thorough import THOROUGH

Results = dict[str, torch.Tensor]
Call = Callable[[torch.Tensor, int], Results]

N = 131


def rows(m: int, n: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Noise, and among it what makes sums cancel: a large mean, an outlier, values of all sizes."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(m, n, generator=generator)
    x[1::5] += 1000.0
    x[2::5, 0] = 3e4
    x[3::5] *= torch.logspace(-6, 3, n)
    return x.to(dtype)


def vector(seed: int, n: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def named(results: Any) -> Results:
    return {name: tensor for name, tensor in results._asdict().items() if tensor is not None}


def plain(x: torch.Tensor, n: int) -> Results:
    return named(normforge.layernorm2d_fwd(x, vector(1, n), vector(2, n), save_mv=True))


def added(x: torch.Tensor, n: int) -> Results:
    options: Any = {"fadd": "pre_add_store", "fquant": "smooth_dynamic", "smooth_scale": vector(3, n)}
    return named(normforge.rmsnorm2d_fwd(x, vector(1, n), residual=x.flip(-1), **options))


def backward(x: torch.Tensor, n: int) -> Results:
    _, _, _, mean, rstd = normforge.layernorm2d_fwd(x, vector(1, n), save_mv=True)
    assert mean is not None
    assert rstd is not None
    return named(normforge.layernorm2d_bwd(x.flip(-1), x, vector(1, n), mean=mean, rstd=rstd, wants=["dx"]))


CALLS = {"plain": plain, "added": added, "backward": backward}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(results: Results, batch: Results, at: slice) -> None:
    for name, tensor in results.items():
        assert torch.equal(bits(tensor), bits(batch[name][at])), name


def agree() -> bool:
    """Whether calls of few rows and of many give all of some rows the same bits, which they do not by chance."""
    x, weight = rows(257), vector(1)
    return torch.equal(normforge.layernorm2d_fwd(x, weight).y[:9], normforge.layernorm2d_fwd(x[:9], weight).y)


@pytest.fixture(autouse=True)
def within() -> Iterator[None]:
    with normforge.batch_invariant():
        yield


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("n", [64, N, pytest.param(1030, marks=THOROUGH)])
def test_a_row_has_the_same_bits_in_every_batch(call: Call, n: int) -> None:
    """Tiles of several rows, rows in chunks that fill them or do not, and rows that no vector starts."""
    x = rows(257, n)
    batch = call(x, n)
    for first, last in ((0, 1), (256, 257), (5, 7), (2, 5), (100, 107), (1, 257)):
        same(call(x[first:last], n), batch, slice(first, last))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("n", [N, 128])
def test_a_row_has_the_same_bits_wherever_it_lies(call: Call, n: int) -> None:
    """Rows of a wider tensor, of one turned round, on two strides, all one row, and at any address."""
    x = rows(8, n)
    batch = call(x, n)
    wide = torch.zeros(8, n + 5)
    wide[:, 3 : 3 + n] = x
    same(call(wide[:, 3 : 3 + n], n), batch, slice(None))
    every_other = torch.zeros(16, n)
    every_other[::2] = x
    same(call(every_other[::2], n), batch, slice(None))
    heads = torch.zeros(4, 3, n)
    heads[:, :2] = x.view(4, 2, n)
    found = {name: tensor.reshape(8, *tensor.shape[2:]) for name, tensor in call(heads[:, :2], n).items()}
    same(found, batch, slice(None))
    moved = torch.zeros(8 * n + 1)[1:].view(8, n).copy_(x)
    same(call(moved, n), batch, slice(None))
    repeated = {name: each[3:4].expand(5, *each.shape[1:]) for name, each in batch.items()}
    same(call(x[3:4].expand(5, n), n), repeated, slice(None))


def test_outputs_that_lie_otherwise_are_written_where_they_are() -> None:
    """A kernel writes elsewhere then, and what it wrote is copied: into x itself, too."""
    n = 128
    x, weight = rows(8, n), vector(1, n)
    expected = normforge.rmsnorm2d_fwd(x, weight, residual=x, fadd="pre_add_store")
    place, total = torch.zeros(8 * n + 1)[1:].view(8, n), torch.zeros(8, n + 1)[:, :n]
    found = normforge.rmsnorm2d_fwd(x, weight, residual=x, fadd="pre_add_store", out=place, residual_out=total)
    assert found.y is place
    assert found.residual_out is total
    assert torch.equal(place, expected.y)
    assert expected.residual_out is not None
    assert torch.equal(total, expected.residual_out)
    own = torch.zeros(8 * n + 1)[1:].view(8, n).copy_(x)
    assert normforge.rmsnorm2d_fwd(own, weight, out=own).y is own
    assert torch.equal(own, normforge.rmsnorm2d_fwd(x, weight).y)


def test_no_rows() -> None:
    """They have no bits."""
    for call in CALLS.values():
        assert all(tensor.shape[0] == 0 for tensor in call(rows(0), N).values())


def test_known_calls_are_of_one_kind() -> None:
    """A call that was checked without it is none of these, and the other way round, however they are nested."""
    assert agree()
    with normforge.batch_invariant(False):
        assert not agree()
        assert not agree()
        with normforge.batch_invariant():
            assert agree()
        assert not agree()
    assert agree()


def test_another_thread_is_not_within() -> None:
    """Nor is another task; each takes its own plans meanwhile."""
    assert agree()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend([agree(), agree()]))
    thread.start()
    thread.join()
    assert found == [False, False]
    assert agree()

    async def inside(started: asyncio.Event, done: asyncio.Event) -> bool:
        with normforge.batch_invariant(False):
            started.set()
            await done.wait()
            return agree()

    async def both() -> tuple[bool, bool]:
        started, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(started, done))
        await started.wait()
        own = agree()
        done.set()
        return own, await task

    assert asyncio.run(both()) == (True, False)


def test_a_backward_pass_is_as_its_forward_pass_was() -> None:
    """Wherever it runs: outside of the `with`, and in threads of autograd's own."""
    weight = vector(1).requires_grad_()

    def gradient(x: torch.Tensor, residual: bool) -> torch.Tensor:
        x = x.clone().requires_grad_()
        if residual:
            y, total = normforge.add_layer_norm(x, x.detach().flip(-1), weight)
        else:
            y, total = normforge.layer_norm(x, (N,), weight), None
        loss = (y * y.detach().flip(-1)).sum() + (0.0 if total is None else total.sum())
        with normforge.batch_invariant(False):
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert x.grad is not None
        return x.grad

    x = rows(257)
    for residual in (False, True):
        # Twice: first, and then known.
        for _ in range(2):
            assert torch.equal(gradient(x, residual)[:9], gradient(x[:9], residual))


def test_what_torch_would_compute_is_refused() -> None:
    """Its operators promise no bits: of float64, in transforms, and for a gradient of a gradient."""
    x = rows(3)
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
    with pytest.raises(ConflictError, match="True or False"):
        normforge.batch_invariant("yes")  # type: ignore[arg-type]  # which is the point


def test_the_environment_speaks_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_process", None)
    monkeypatch.setenv("NORMFORGE_BATCH_INVARIANT", "2")
    with pytest.raises(SettingError, match="set it to one of them"):
        invariance.by_default()
    monkeypatch.setenv("NORMFORGE_BATCH_INVARIANT", "1")
    monkeypatch.setattr(invariance, "anywhere", False)
    assert invariance.by_default()
    assert invariance.anywhere

"""Dropout, add and norm in the functional API and its modules: gradients, what is drawn, and who else sees the call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import normforge
from normforge.families import eager
from normforge.random_mask import dropout_mask
from normforge.selection import dispatch
from proving.cases import RNG, SIGNED_RNG, Tensors, gradients, operands

from ..calling import captured, counted, each_device, plain, same_bits, there
from ..thorough import THOROUGH

N = 96
P = 0.3

ADD: dict[str, Callable[..., Any]] = {"layer": normforge.add_layer_norm, "rms": normforge.add_rms_norm}
each_add = pytest.mark.parametrize("norm", ADD)
# Where what is tested is written once for both.
either_add = pytest.mark.parametrize("norm", ["rms", pytest.param("layer", marks=THOROUGH)])


def leaves(norm: str, *leading: int, device: str = "cpu") -> Tensors:
    """Return fresh operands that require gradients."""
    return operands(plain(f"add_{norm}", x_bias=True, shape=(*leading, N)), device)


@each_device
@either_add
def test_the_mask_is_what_was_drawn(norm: str, device: str) -> None:
    given = {name: tensor.detach() for name, tensor in leaves(norm, 2, 3, device=device).items()}
    given["residual"] = torch.zeros_like(given["x"])
    for rng in (None, RNG, torch.Generator(device)):
        _, total, mask = ADD[norm](**given, dropout_p=0.5, dropout_rng=rng, return_mask=True)
        assert mask.dtype is torch.bool
        assert torch.equal(total != 0, mask)
    y, total, mask = ADD[norm](**given, return_mask=True)
    assert mask.all()
    assert same_bits(y, ADD[norm](**given)[0])


@each_device
@either_add
def test_checkpoint_drops_the_same_again(norm: str, device: str) -> None:
    given = leaves(norm, 4, device=device)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        y, total = ADD[norm](**dict(zip(given, tensors, strict=True)), dropout_p=P)
        loss: torch.Tensor = (y * total).sum()
        return loss

    torch.manual_seed(5)
    want = torch.autograd.grad(run(*given.values()), [*given.values()])
    for reentrant in (False, True):
        torch.manual_seed(5)
        loss = checkpoint(run, *given.values(), use_reentrant=reentrant)
        # What is drawn between has no part in it.
        torch.rand(7, device=device)
        loss.backward()
        for tensor, exact in zip(given.values(), want, strict=True):
            assert same_bits(there(tensor.grad), exact)
            tensor.grad = None


@each_add
def test_where_no_kernel_runs_the_bits_are_the_same(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: tensor.detach() for name, tensor in leaves(norm, 4).items()}
    _, total = ADD[norm](**given, dropout_p=P, dropout_rng=RNG)
    launched = counted(monkeypatch, (eager, "dropped", "torch"))
    monkeypatch.delenv("TRITON_INTERPRET")
    # Where kernels run is asked of a kind of call once.
    dispatch.forget()
    y, instead = ADD[norm](**given, dropout_p=P, dropout_rng=RNG)
    assert launched == ["torch"]
    assert same_bits(instead, total)
    # In fp64 too, which no kernel takes.
    wide = {name: tensor.double() for name, tensor in given.items()}
    _, exact = ADD[norm](**wide, dropout_p=P, dropout_rng=RNG)
    torch.testing.assert_close(exact.float(), total)
    torch.testing.assert_close(y, ADD[norm](**given, dropout_p=P, dropout_rng=RNG)[0])


@either_add
def test_vmap_draws_anew_or_the_same(norm: str) -> None:
    given = {name: tensor.detach() for name, tensor in leaves(norm, 4).items()}
    x, others = given.pop("x"), given

    def drawn(x: torch.Tensor) -> torch.Tensor:
        y, total = ADD[norm](x, **others, eps=1e-5, dropout_p=P)
        value: torch.Tensor = (y * total).sum()
        return value

    several = torch.stack((x, x))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(drawn)(several)
    apart = torch.vmap(drawn, randomness="different")(several)
    assert apart[0] != apart[1]
    together = torch.vmap(drawn, randomness="same")(several)
    assert together[0] == together[1]


@THOROUGH
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@each_add
def test_compiled_calls_draw_anew(norm: str, backend: str) -> None:
    given = leaves(norm, 4)

    def run(rng: Any, **operands: torch.Tensor) -> Any:
        return ADD[norm](**operands, eps=1e-5, dropout_p=P, dropout_rng=rng, return_mask=True)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    y, total, mask = compiled(None, **given)
    masks = [mask, *(compiled(None, **given)[2] for _ in range(2))]
    assert not any(torch.equal(a, b) for a, b in pairwise(masks))
    # What is returned was drawn by the same seed as what is computed, forward and backward.
    torch.testing.assert_close(total - given["residual"], (given["x"] + given["x_bias"]) * mask / (1 - P))
    (dx,) = torch.autograd.grad(total.sum() + y.square().sum(), given["x"])
    assert torch.equal(dx != 0, mask)
    eager = run(SIGNED_RNG, **given)
    for got, want in zip(compiled(SIGNED_RNG, **given), eager, strict=True):
        torch.testing.assert_close(got, want)
    weights = y.detach(), total.detach()
    found, wanted = (gradients(each[:2], given, weights) for each in (compiled(SIGNED_RNG, **given), eager))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@THOROUGH
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_two_dropouts_of_one_graph_differ(backend: str) -> None:
    """As do their gradients, each of its own mask."""
    given = {name: tensor for name, tensor in leaves("rms", 4).items() if name != "x_bias"}

    def run(**operands: torch.Tensor) -> Any:
        both = [ADD["rms"](**operands, dropout_p=0.5, return_mask=True) for _ in range(2)]
        return [part for three in both for part in three]

    y, total, mask, other_y, other_total, other_mask = torch.compile(run, fullgraph=True, backend=backend)(**given)
    assert not torch.equal(mask, other_mask)
    for out, summed, kept in ((y, total, mask), (other_y, other_total, other_mask)):
        loss = (out * torch.arange(4.0 * N).view(4, N)).sum() + summed.sum()
        (dx,) = torch.autograd.grad(loss, given["x"], retain_graph=True)
        assert torch.equal(dx != 0, kept)


@pytest.mark.gpu
@each_add
def test_each_replay_of_a_graph_draws_anew(norm: str) -> None:
    given = leaves(norm, 64, device="cuda")
    zero = torch.zeros_like(given["x"], requires_grad=True)
    one = torch.ones_like(given["x"], requires_grad=True)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        _, total = ADD[norm](one, zero, dropout_p=P)
        (dx,) = torch.autograd.grad(total.sum(), one)
        return total.detach(), dx

    def by_numbers() -> Any:
        return ADD[norm](one.detach(), zero.detach(), dropout_p=P, dropout_rng=RNG)[1]

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's is untyped
    with torch.cuda.stream(stream):
        run()
        by_numbers()
    torch.cuda.current_stream().wait_stream(stream)
    # Numbers are filled in on the device.
    graph, ((total, dx), told) = captured(lambda: (run(), by_numbers()))
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(total != 0, dx != 0)
        seen.append(total.clone())
        assert torch.equal((told != 0).cpu(), dropout_mask(told.shape, P, SIGNED_RNG))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    # Eagerly the generator goes on from there.
    assert not torch.equal(run()[0], seen[2])


@THOROUGH
@each_add
def test_recorded_programs_draw_anew(norm: str) -> None:
    rows = torch.randn(2, 4, N).unbind()

    def draws(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return ADD[norm](x, residual, dropout_p=P)

    # Which torch declares no types for.
    trace: Any = torch.jit.trace
    for drawn in (trace(draws, rows, check_trace=False), make_fx(draws)(*rows), torch.fx.symbolic_trace(draws)):
        assert not torch.equal(drawn(*rows)[1], drawn(*rows)[1])


@either_add
def test_modules_drop_while_they_train(norm: str) -> None:
    kind: Any = {"layer": normforge.AddLayerNorm, "rms": normforge.AddRMSNorm}[norm]
    module = kind(N, dropout_p=P)
    assert "dropout_p=0.3" in repr(module)
    assert "dropout" not in repr(kind(N))
    x, residual = torch.ones(4, N), torch.zeros(4, N)
    torch.manual_seed(1)
    _, total = module(x, residual)
    torch.manual_seed(1)
    assert same_bits(total, ADD[norm](x, residual, dropout_p=P)[1])
    module.eval()
    assert same_bits(module(x, residual)[1], x)
    wide = kind((4, N // 4), dropout_p=P)
    total = wide(x.view(4, 4, N // 4), residual.view(4, 4, N // 4))[1]
    assert 0 < int((total == 0).sum()) < total.numel()

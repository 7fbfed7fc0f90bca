"""Launches on a card: straight to the compiled kernel, on the right stream and device, compiled once, and aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.families.public import layernorm2d_bwd
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch
from normforge.upstream import triton_launcher

from .. import calling
from ..calling import FORWARD, ORACLE, agree, all_plans, captured, each_norm, in_threads, same_bits, there

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_known", "nothing_compiled")]


def launchers() -> list[Launcher]:
    """Everything made ready for the forward calls that are known."""
    plans = [plan for plan in all_plans() if not plan.mode.is_backward]
    return [launcher for plan in plans for ready in plan._prepared if ready is not None for launcher in ready.launchers]


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call] # as torch ships it


@each_norm
@pytest.mark.parametrize("n", [64, 1500, 33000])
def test_a_launch_goes_straight_to_the_compiled_kernel_and_gives_what_tritons_own_gives(
    norm: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(70, n, device="cuda", dtype=torch.bfloat16), torch.randn(n, device="cuda")
    modes: dict[str, Any] = {"residual": x.clone(), "fadd": 1, "fquant": 2, "save_mv": True}
    inner = [FORWARD[norm](x, weight, **given) for given in ({}, modes) for _ in range(2)]
    assert launchers()
    assert all(launcher.launch is not None for launcher in launchers())
    monkeypatch.setattr(triton_launcher, "bind", lambda *_: None)
    dispatch.forget()
    public = [FORWARD[norm](x, weight, **given) for given in ({}, modes) for _ in range(2)]
    assert all(launcher.launch is None for launcher in launchers())
    for ours, theirs in zip(inner, public, strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    agree(inner[0], ORACLE[norm](x, weight))
    agree(inner[2], ORACLE[norm](x, weight, **modes))


def test_the_current_stream_of_each_thread_is_the_one_that_is_used() -> None:
    x = torch.zeros(64, 4096, device="cuda")
    new = torch.randn_like(x)
    weight = torch.ones(4096, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)
    expected = torch.nn.functional.layer_norm(new, (4096,), weight)
    (expected_gradient,) = torch.autograd.grad(expected, weight, dy)
    # Known, so that what follows is fast.
    torch.autograd.grad(normforge.layer_norm(x, (4096,), weight), weight, dy)
    torch.cuda.synchronize()

    def run(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = x.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(new_stream()):
            # On any other stream the norm would be done, of zeros, long before this is over.
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call] # as torch ships it
            mine.copy_(new)
            y = normforge.layer_norm(mine, (4096,), weight)
            (gradient,) = torch.autograd.grad(y, weight, dy)
            torch.cuda.current_stream().synchronize()
        return y, gradient

    for y, gradient in in_threads(run, range(2)):
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-3)


@each_norm
@pytest.mark.parametrize(("m", "n"), [(300, 512), (300, 4096), (300, 20000), (600, 140000)])
def test_a_graph_replays_forward_and_backward(norm: str, m: int, n: int) -> None:
    """Rows of 140000 are spread over programs that wait for one another, in both directions."""
    functions: dict[str, Callable[..., torch.Tensor]] = {"layer": normforge.layer_norm, "rms": normforge.rms_norm}
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(n, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> tuple[torch.Tensor, ...]:
        y = functions[norm](x, (n,), weight)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    side = new_stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    side.synchronize()
    graph, results = captured(step)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            dy.copy_(torch.randn_like(dy))
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(replayed, again) for replayed, again in zip(results, step(), strict=True))


@pytest.mark.parametrize("n", [40000, 70000, 131072])
@pytest.mark.parametrize("m", [3, 900])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_rows_of_sums_stored_over_the_residual(dtype: torch.dtype, m: int, n: int) -> None:
    """Some are spread over programs that wait for one another; more rows than teams, and fewer."""
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(m, n, device="cuda", dtype=dtype)
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    modes: dict[str, Any] = {"fadd": "pre_add_store", "weight_offset": 1.0, "save_mv": True}
    expected = ORACLE["rms"](x, weight, residual=residual, **modes)
    made = [normforge.rmsnorm2d_fwd(x, weight, residual=residual, **modes) for _ in range(2)]
    place = residual.clone()
    made.append(normforge.rmsnorm2d_fwd(x, weight, residual=place, residual_out=place, **modes))
    for each in made:
        agree(each, expected)
        assert same_bits(each.y, made[0].y)
        assert torch.equal(there(each.residual_out), x + residual)


@pytest.mark.parametrize("value", [1e20, 1e30])
@pytest.mark.parametrize(("m", "n"), [(3, 70000), (900, 70000), (600, 140000)])
def test_long_rows_whose_squares_overflow_are_zeros(m: int, n: int, value: float) -> None:
    """Rows of 140000 are spread over programs; so are those of 70000, where there are few."""
    calling.assert_squares_overflow_to_zeros(m, n, value, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [64, 1888, 20000])
def test_misaligned_tensors_after_aligned_ones(n: int, dtype: torch.dtype) -> None:
    """Wide loads of a kernel for aligned pointers would fault, and take the process's CUDA context along."""
    memory, weights = torch.randn(4 * n + 1, device="cuda").to(dtype), torch.randn(n + 1, device="cuda").to(dtype)
    dys = torch.randn(4 * n + 1, device="cuda").to(dtype)
    aligned, shifted = slice(0, -1), slice(1, None)
    for at, weight_at in ((aligned, aligned), (shifted, aligned), (aligned, shifted), (shifted, shifted)) * 2:
        x, weight = memory[at].view(4, n), weights[weight_at]
        forward = normforge.layernorm2d_fwd(x, weight, save_mv=True)
        agree(forward, ORACLE["layer"](x, weight, save_mv=True))
        out = torch.empty(4 * n + 1, device="cuda", dtype=dtype)[at].view(4, n)
        # Narrower stores go with another layout, and so with other roundings of the sums.
        agree(normforge.layernorm2d_fwd(x, weight, out=out, save_mv=True), ORACLE["layer"](x, weight, save_mv=True))
        wants = ("dx", "dweight", "dbias")
        given: dict[str, Any] = {"mean": there(forward.mean), "rstd": there(forward.rstd), "wants": wants}
        here = layernorm2d_bwd(dys[at].view(4, n), x, weight, **given)
        copied = layernorm2d_bwd(dys[at].view(4, n).clone(), x.clone(), weight.clone(), **given)
        for ours, expected in zip(here, copied, strict=True):
            if ours is not None and expected is not None:
                torch.testing.assert_close(ours, expected)
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_each_device_runs_its_own_whichever_is_current() -> None:
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in (0, 1, 0):
                x = torch.randn(40, 4096, device=f"cuda:{device}", requires_grad=True)
                weight = torch.randn(4096, device=f"cuda:{device}", requires_grad=True)
                y = normforge.layer_norm(x, (4096,), weight)
                dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
                assert {t.device.index for t in (y, dx, dweight)} == {device}
                torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (4096,), weight))
                assert torch.cuda.current_device() == current
    x, elsewhere = torch.randn(4, 64, device="cuda:0"), torch.ones(64, device="cuda:1")
    normforge.layernorm2d_fwd(x, elsewhere.to("cuda:0"))
    for _ in range(2):
        with pytest.raises(errors.DeviceError, match="weight is on cuda:1 and x on cuda:0"):
            normforge.layernorm2d_fwd(x, elsewhere)

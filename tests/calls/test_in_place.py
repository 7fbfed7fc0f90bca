"""Outputs written in place, as autograd sees them: as torch's own in-place operators and `out=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normforge
from normforge.calls.functions import FUNCTIONS, completed
from normforge.errors import GradientError

from ..calling import FORWARD, each_norm, same_bits
from ..nn.oracle import backward
from ..operators import registered

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

M, N = 3, 64
MODIFIED = "has been modified by an inplace operation"


def added_into(norm: str, x: torch.Tensor, residual: torch.Tensor, residual_out: torch.Tensor) -> None:
    """What an inference engine does: the residual stream is updated where it lies."""
    FORWARD[norm](x, residual=residual, fadd="pre_add_store", residual_out=residual_out)


def normalised_into(norm: str, x: torch.Tensor, out: torch.Tensor) -> None:
    FORWARD[norm](x, out=out)


def operator_into(norm: str, x: torch.Tensor, out: torch.Tensor, residual_out: torch.Tensor | None = None) -> None:
    function = f"{norm}norm2d_fwd"
    fadd = "none" if residual_out is None else "pre_add_store"
    given = completed(function, {"x": x, "residual": residual_out, "fadd": fadd})
    passed = [given[name] for name in FUNCTIONS[function].passed]
    registered.FORWARD_INTO[norm](*passed, out, residual_out)


@each_norm
@pytest.mark.parametrize("known", [False, True])
def test_a_saved_residual_cannot_be_overwritten_unseen(norm: str, known: bool) -> None:
    linear = torch.nn.Linear(N, N)
    x, residual = torch.randn(M, N), torch.randn(M, N)
    if known:
        added_into(norm, x.clone(), residual.clone(), torch.empty(M, N))
        added_into(norm, x, spare := residual.clone(), spare)
    z = linear(residual)
    added_into(norm, x, residual, residual)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(z.square().sum())


@each_norm
def test_a_saved_x_cannot_be_overwritten_unseen(norm: str) -> None:
    h = torch.randn(M, N, requires_grad=True).exp()
    with torch.no_grad():
        normalised_into(norm, h, h)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(h.sum())


@each_norm
def test_the_operators_that_write_are_seen_to(norm: str) -> None:
    linear = torch.nn.Linear(N, N)
    for written in ("out", "residual_out"):
        kept = torch.randn(M, N)
        z = linear(kept)
        other = torch.empty(M, N)
        out, residual_out = (kept, None) if written == "out" else (other, kept)
        operator_into(norm, torch.randn(M, N), out, residual_out)
        with pytest.raises(RuntimeError, match=MODIFIED):
            backward(z.sum())


@pytest.mark.parametrize("add", [normforge.add_layer_norm, normforge.add_rms_norm])
def test_a_sum_that_normforge_saved_cannot_be_overwritten_unseen(add: Callable[..., Any]) -> None:
    x, residual = torch.randn(M, N, requires_grad=True), torch.randn(M, N)
    y, total = add(x, residual)
    with torch.no_grad():
        added_into("rms", torch.randn(M, N), total, total)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(y.sum())


def test_an_x_that_normforge_saved_cannot_be_overwritten_unseen() -> None:
    x, weight = torch.randn(M, N), torch.ones(N, requires_grad=True)
    y = normforge.layer_norm(x, (N,), weight)
    normalised_into("layer", x, x)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(y.sum())


# From a tensor that is kept to the part of it that is written to.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda kept: kept,
    "a view": lambda kept: kept.view(2, M, N),
    "rows": lambda kept: kept[M:],
    "columns": lambda kept: kept.view(M, 2 * N)[:, N:],
    "detached": lambda kept: kept.detach()[:M],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=[name.replace(" ", "_") for name in VIEWS])
def test_a_part_of_what_is_kept_cannot_be_overwritten_unseen(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    kept = torch.randn(2 * M, N)
    z = kept * torch.ones(N, requires_grad=True)
    out = view(kept)
    normforge.layernorm2d_fwd(torch.randn(out.shape), out=out)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(z.sum())


def test_what_is_kept_of_a_view_cannot_be_overwritten_through_its_base() -> None:
    memory = torch.randn(2 * M, N)
    z = memory[:M] * torch.ones(N, requires_grad=True)
    normforge.layernorm2d_fwd(torch.randn(2 * M, N), out=memory)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(z.sum())


def test_a_write_into_what_nothing_kept_leaves_gradients_alone() -> None:
    linear = torch.nn.Linear(N, N)
    residual, x = torch.randn(M, N), torch.randn(M, N)
    # Saved after the write, as in the next block.
    added_into("rms", x, residual, residual)
    expected = torch.autograd.grad(linear(residual.clone()).square().sum(), linear.weight)
    assert same_bits(torch.autograd.grad(linear(residual).square().sum(), linear.weight)[0], expected[0])


def test_a_checkpoint_that_is_recomputed_of_what_was_overwritten() -> None:
    """As with torch's own: a checkpoint keeps its input without asking whether it changed."""
    linear = torch.nn.Linear(N, N)
    x = torch.randn(M, N)

    def block(residual: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = linear(residual)
        added_into("rms", x, residual, residual)
        return z

    z = checkpoint(block, torch.randn(M, N), use_reentrant=False)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(z.square().sum())


@each_norm
@pytest.mark.parametrize("name", ["out", "residual_out"])
@pytest.mark.parametrize("known", [False, True])
def test_an_output_that_requires_a_gradient_is_refused(norm: str, name: str, known: bool) -> None:
    leaf = torch.zeros(M, N, requires_grad=True)
    given: dict[str, Any] = {"residual": torch.randn(M, N), "fadd": 1} if name == "residual_out" else {}
    x = torch.randn(M, N)
    for output in (leaf[:], leaf * 2, leaf):
        if known:
            FORWARD[norm](x, **given, **{name: torch.empty(M, N)})
        message = rf"^{name} requires a gradient and .*; call under torch.no_grad\(\), or pass {name}.detach\(\)$"
        with pytest.raises(GradientError, match=message):
            FORWARD[norm](x, **given, **{name: output})
        assert not output.any()
        with torch.no_grad():
            FORWARD[norm](x, **given, **{name: output})
            assert output.any()
            output.zero_()
        FORWARD[norm](x, **given, **{name: output.detach()})
        assert output.any()
        with torch.no_grad():
            output.zero_()


@each_norm
@pytest.mark.parametrize("name", ["out", "residual_out"])
@pytest.mark.parametrize("known", [False, True])
def test_an_inference_tensor_is_written_to_in_inference_mode_alone(norm: str, name: str, known: bool) -> None:
    given: dict[str, Any] = {"residual": torch.randn(M, N), "fadd": 1} if name == "residual_out" else {}
    x = torch.randn(M, N)
    expected = getattr(FORWARD[norm](x, **given), "y" if name == "out" else name)
    with torch.inference_mode():
        output = torch.zeros(M, N)
    if known:
        FORWARD[norm](x, **given, **{name: torch.empty(M, N)})
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(GradientError, match=rf"^{name} is an inference tensor, .* pass {name}.clone\(\)$"):
            FORWARD[norm](x, **given, **{name: output})
    assert not output.any()
    with torch.inference_mode():
        FORWARD[norm](x, **given, **{name: output})
    assert same_bits(output, expected)


def test_a_write_in_inference_mode_is_seen_afterwards() -> None:
    kept = torch.randn(M, N)
    z = kept * torch.ones(N, requires_grad=True)
    with torch.inference_mode():
        normalised_into("rms", torch.randn(M, N), kept)
    with pytest.raises(RuntimeError, match=MODIFIED):
        backward(z.sum())


def written_once(norm: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    added_into(norm, x, residual, residual)
    return residual * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@each_norm
def test_a_write_in_a_graph_is_seen_too(norm: str, backend: str) -> None:
    linear = torch.nn.Linear(N, N)
    x, residual = torch.randn(M, N), torch.randn(M, N)
    function = torch.compile(written_once, backend=backend, fullgraph=True)
    for _ in range(2):
        z = linear(residual)
        expected = written_once(norm, x, residual.clone())
        assert same_bits(function(norm, x, residual), expected)
        with pytest.raises(RuntimeError, match=MODIFIED):
            backward(z.square().sum())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("write", [added_into, lambda norm, x, *_: x.mul_(2)], ids=["ours", "torch"])
def test_a_write_behind_what_the_same_graph_keeps(write: Callable[..., Any], backend: str) -> None:
    linear = torch.nn.Linear(N, N)

    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = linear(residual) + linear(x)
        write("rms", x, residual, residual)
        return z

    function = torch.compile(step, backend=backend, fullgraph=True)
    # aot_eager differentiates while it compiles.
    with pytest.raises((RuntimeError, torch._dynamo.exc.BackendCompilerFailed), match=MODIFIED):
        backward(function(torch.randn(M, N), torch.randn(M, N)).square().sum())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["out", "residual_out"])
def test_an_output_that_requires_a_gradient_is_refused_in_a_graph(name: str, backend: str) -> None:
    given: dict[str, Any] = {"residual": torch.randn(M, N), "fadd": 1} if name == "residual_out" else {}

    def call(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return FORWARD["rms"](x, **given, **{name: output}).y

    x = torch.randn(M, N)
    with pytest.raises(GradientError, match=f"^{name} requires a gradient"):
        torch.compile(call, backend=backend)(x, torch.randn(M, N, requires_grad=True))
    # A frame that failed is not tried again.
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(call, backend=backend, fullgraph=True)(x, leaf := torch.randn(M, N, requires_grad=True))
        expected = normforge.rmsnorm2d_fwd(x, **given)
    assert same_bits(leaf, expected.y if name == "out" else expected.residual_out)

"""Outputs written in place, as autograd sees them: as torch's own in-place operators and `out=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from normforge.calls.functions import FUNCTIONS, completed
from proving.cases import cases, operands

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


def kept_by_torch(norm: str) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.randn(M, N)
    return torch.nn.Linear(N, N)(kept), kept


def kept_of_a_gradient(norm: str) -> tuple[torch.Tensor, torch.Tensor]:
    kept = torch.randn(M, N, requires_grad=True).exp()
    return kept, kept


def kept_by_a_norm(norm: str) -> tuple[torch.Tensor, torch.Tensor]:
    (case,) = cases("plain", vary=(), norm=norm, shape=(M, N), without=("residual", "x_bias"))
    given = operands(case)
    x = given["x"].detach()
    return case.run({**given, "x": x})[0], x


def kept_by_an_add(norm: str) -> tuple[torch.Tensor, torch.Tensor]:
    (case,) = cases("plain", vary=(), norm=norm, shape=(M, N))
    y, total = case.run(operands(case))
    return y, total


# What keeps a tensor for its backward pass, and what writes to the tensor.
KEEPING = (kept_by_torch, kept_of_a_gradient, kept_by_a_norm, kept_by_an_add)
WRITING: dict[str, Callable[[str, torch.Tensor], None]] = {
    "out": lambda norm, kept: normalised_into(norm, kept, kept),
    "residual_out": lambda norm, kept: added_into(norm, torch.randn(M, N), kept, kept),
    "operator, out": lambda norm, kept: operator_into(norm, torch.randn(M, N), kept),
    "operator, residual_out": lambda norm, kept: operator_into(norm, torch.randn(M, N), torch.empty(M, N), kept),
    "in inference": torch.inference_mode()(lambda norm, kept: normalised_into(norm, torch.randn(M, N), kept)),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("write", WRITING.values(), ids=WRITING)
@pytest.mark.parametrize("keep", KEEPING)
@each_norm
def test_what_is_kept_cannot_be_overwritten_unseen(norm: str, keep: Any, write: Any, known: bool) -> None:
    if known:
        write(norm, torch.randn(M, N))
    z, kept = keep(norm)
    with torch.set_grad_enabled(not kept.requires_grad):
        write(norm, kept)
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

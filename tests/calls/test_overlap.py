"""Where outputs may lie, and what autograd sees of outputs that are written in place."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge.calls.functions import FUNCTIONS, completed
from normforge.calls.row_layout import elements_overlap, may_overlap, rows_overlap
from normforge.errors import LayoutError
from proving.cases import cases, operands

from ..calling import FORWARD, backward, each_norm, same_bits, table_at
from ..operators import registered

M, N = 3, 64


def heads(memory: torch.Tensor, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Rows on several strides in a flat memory."""
    return memory.as_strided(shape, (*strides, 1), first)


def test_agrees_with_counting_elements() -> None:
    """Of two tensors on two strides each, in any order; what is packed, or interleaves evenly, is told exactly."""
    memory = torch.arange(200, dtype=torch.int8)
    seen = {True: 0, False: 0}
    draw = random.Random(5)
    for _ in range(5000):
        strides = draw.choice(((24, 4), (4, 24), (24, 8), (12, 3), (24, 5), (9, 3), (9, 2), (9, 0)))
        others = draw.choice((strides, strides, (24, 4), (0, 6), (20, 2)))
        a, b = (
            heads(memory, draw.randrange(most), (draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3)), each)
            for most, each in ((12, strides), (40, others))
        )
        shared = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
        answers = may_overlap(a, b), may_overlap(b, a)
        told = a.shape, a.stride(), a.storage_offset(), b.shape, b.stride(), b.storage_offset()
        assert answers[0] == answers[1], told
        assert answers[0] or not shared, told
        # Rows of up to three elements then have room between rows.
        if others == strides and min(strides) >= 3:
            assert answers[0] == shared, told
            seen[shared] += 1
    assert min(seen.values()) > 500


def test_rows_of_one_tensor_overlap() -> None:
    """It never passes what overlaps, and passes what is laid out as tensors are."""
    memory = torch.arange(100, dtype=torch.int8)
    for strides in itertools.product(range(9), repeat=2):
        for shape in itertools.product((1, 2, 3), (1, 2, 3), (1, 2)):
            view = heads(memory, 0, shape, strides)
            shared = len(set(view.flatten().tolist())) < view.numel()
            assert rows_overlap(view) or not shared, (shape, strides)
    for view in (
        memory[:60].view(5, 6, 2)[:, 1:4],
        memory[:60].view(5, 6, 2).transpose(0, 1),
        memory[:4].view(1, 2, 2),
    ):
        assert not rows_overlap(view)


def test_elements_of_one_tensor_overlap() -> None:
    """Told exactly, of any two strides."""
    memory = torch.arange(100, dtype=torch.int8)
    for strides in itertools.product(range(1, 9), repeat=2):
        for shape in itertools.product(range(1, 6), repeat=2):
            view = memory.as_strided(shape, strides)
            assert elements_overlap(view) == (len(set(view.flatten().tolist())) < view.numel()), (shape, strides)


def test_counts_bytes_not_elements() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    wide = memory[:128].view(torch.float32).as_strided((2, 4), (8, 1))
    beside = memory.as_strided((2, 16), (32, 1), 16)
    assert not may_overlap(wide, beside)
    assert may_overlap(wide, memory.as_strided((2, 16), (32, 1), 15))


def test_nothing_overlaps_what_is_empty() -> None:
    memory = torch.zeros(8)
    for empty in (memory[:0].view(0, 1), memory[:4].expand(0, 4)):
        assert not may_overlap(empty, memory.view(2, 4))
        assert not may_overlap(memory.view(2, 4), empty)


WIDE, FREE, X, RESIDUAL = torch.randn(4, 2 * N), torch.zeros(M, N), torch.randn(M, N), torch.randn(M, N)
SAME_ROW, PART = torch.zeros(1, N).expand(M, N), WIDE[:M, :N]


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(("message", "given"), table_at(Path(__file__).with_name("overlapping.yaml"), globals()))
def test_outputs_over_other_tensors_are_refused(message: str, given: dict[str, Any]) -> None:
    """Cold, by `which`, and after a call like it whose outputs lie apart."""
    apart: dict[str, Any] = {
        name: torch.empty_like(given[name]).contiguous() for name in ("out", "residual_out") if name in given
    }
    for call in (normforge.layernorm2d_fwd, normforge.which):
        with pytest.raises(LayoutError, match=message):
            call(**given)
    normforge.layernorm2d_fwd(**{**given, **apart})
    for _ in range(2):
        with pytest.raises(LayoutError, match=message):
            normforge.layernorm2d_fwd(**given)


MODIFIED = "has been modified by an inplace operation"


def added_into(norm: str, x: torch.Tensor, residual: torch.Tensor, residual_out: torch.Tensor) -> None:
    """What an inference engine does: the residual stream is updated where it lies."""
    FORWARD[norm](x, residual=residual, fadd="pre_add_store", residual_out=residual_out)


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
WRITING: dict[str, Callable[[str, torch.Tensor], object]] = {
    "out": lambda norm, kept: FORWARD[norm](kept, out=kept),
    "residual_out": lambda norm, kept: added_into(norm, torch.randn(M, N), kept, kept),
    "operator, out": lambda norm, kept: operator_into(norm, torch.randn(M, N), kept),
    "operator, residual_out": lambda norm, kept: operator_into(norm, torch.randn(M, N), torch.empty(M, N), kept),
    "in inference": torch.inference_mode()(lambda norm, kept: FORWARD[norm](torch.randn(M, N), out=kept)),
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


@pytest.mark.usefixtures("fresh_dynamo")
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


@pytest.mark.usefixtures("fresh_dynamo")
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

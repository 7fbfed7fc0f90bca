"""`patch` computes norms together with the sum that reads their result alone, and no other norm so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge.errors import NormforgeError
from normforge.families import post_add, renormed

from ..calling import each_device
from .decoders import made
from .models import WIDTH, GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, T5LayerNorm, written
from .oracle import backward
from .test_blocks import HOOKS, agree
from .twins import Counted, copies, results, twins

ADDED = {
    "Gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "Olmo2": ("input_layernorm", "post_attention_layernorm"),
}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Return how many norms were computed together with the sum of their result; sums of any size are."""
    monkeypatch.setenv("NORMFORGE_FUSE_FROM", "0")
    return Counted(monkeypatch, post_add, "normalise")


@pytest.fixture
def renormed_sums(added: Counted, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Return how many were computed together with the norm behind their sum, too."""
    return Counted(monkeypatch, renormed, "add_ahead")


@pytest.mark.parametrize("family", ADDED)
@each_device
def test_sums_are_computed_with_the_norm_before_them(
    family: str, device: str, added: Counted, renormed_sums: Counted
) -> None:
    model = made(family, device=device)
    patched = copy.deepcopy(model)
    assert [each.added for each in normforge.patch(patched).fused] == 2 * [ADDED[family]]
    assert f"{', '.join(ADDED[family])} with the sum behind" in repr(patched.layers[0])
    for each in (patched, *copies(patched)):
        agree(model, each)
        # Gemma's block normalises the first of its sums again.
        again = 2 if family == "Gemma2" else 0
        assert (added.counts(), renormed_sums.counts()) == ((4 - again,), (again,))
    normforge.unpatch(patched)
    assert type(patched.layers[0]) is type(model.layers[0])


class Branch(torch.nn.Module):
    """A norm behind a branch; subclasses add its result."""

    def __init__(self, norm: Any = LlamaRMSNorm) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.other = norm(WIDTH)
        self.part = torch.nn.Linear(WIDTH, WIDTH)
        torch.nn.init.normal_(self.norm.weight, 1.0)

    def tripled(self, x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(3)
        return x


def form(name: str, *body: str) -> Any:
    return written(Branch, name, "def forward(self, x, flag=True):", "h = self.part(x)", *body, names=globals())


PLAINLY = form("Plainly", "h = self.norm(h)", "h = h + x", "return h")


@pytest.mark.parametrize(
    "cls",
    [
        form("WithinTheSum", "return x * 2 + self.norm(h)"),
        form("AddedInAFunction", "return self.part(x + self.norm(self.part(h)))"),
        form("WithinABranch", "if flag:", "    h = self.norm(h)", "    h = x + h", "return h"),
    ],
)
def test_forms_of_a_sum_behind_a_norm(cls: Any, added: Counted) -> None:
    module, patched = twins(cls())
    x = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(patched(x), module(x))
    assert added.counts() == (1,)


WITH_A_NORM_BEHIND = form("WithANormBehind", "h = self.norm(h)", "h = x + h", "return self.other(h) * h")


@pytest.mark.parametrize("norm", [LlamaRMSNorm, GemmaRMSNorm, torch.nn.LayerNorm, Olmo2RMSNorm])
@each_device
def test_a_sum_between_two_norms(norm: Any, device: str, added: Counted, renormed_sums: Counted) -> None:
    """One kernel computes both norms and the sum; gradients are those of three operations."""
    module, patched = twins(WITH_A_NORM_BEHIND(norm).to(device))
    x = torch.randn(2, 3, WIDTH, device=device)
    for one, other in zip(results(patched, x), results(module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(patched(x), module(x))
    assert (added.counts(), renormed_sums.counts()) == ((0,), (2,))


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.other, "variance_epsilon", 1e-3),
        lambda block: setattr(block, "other", GemmaRMSNorm(WIDTH)),
        lambda block: block.other.to(torch.float64),
        lambda block: block.other.register_forward_hook(lambda *_: None),
    ],
    ids=["eps", "offset", "dtype", "hook"],
)
def test_a_norm_behind_a_sum_that_is_of_another_kind(
    change: Callable[[Any], object], added: Counted, renormed_sums: Counted
) -> None:
    module = WITH_A_NORM_BEHIND()
    change(module)
    module, patched = twins(module)
    x = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(patched(x), module(x), rtol=1e-5, atol=1e-5)
    assert (added.counts(), renormed_sums.counts()) == ((1,), (0,))


def test_hooks_see_the_gradient_of_a_sum_between_two_norms(renormed_sums: Counted) -> None:
    hooked = form("Hooked", "h = self.norm(h)", "h = x + h", "y = self.other(h)", "h.retain_grad()", "return h, y")
    module, patched = twins(hooked())
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    gradients = []
    for each in (module, patched):
        total, y = each(x)
        loss: torch.Tensor = (total.square() + y.exp()).sum()
        backward(loss)
        gradients.append(total.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    assert renormed_sums.counts() == (1,)


@pytest.mark.parametrize(
    "cls",
    [
        form("ReadTwice", "h = self.norm(h)", "h = x + h * h", "return h"),
        form("ReadAgain", "h = self.norm(h)", "y = x + h", "return y + h"),
        form("AddedTwice", "h = self.norm(h)", "h = h + h", "return h"),
        form("CalledBetween", "h = self.norm(h)", "self.tripled(x)", "h = x + h", "return h"),
        form("CalledWithin", "h = self.norm(h)", "h = h + self.tripled(x)", "return h"),
        form("Scaled", "h = self.norm(h)", "h = x + 2 * h", "return h"),
        form("Subtracted", "h = self.norm(h)", "h = x - h", "return h"),
        form("InPlace", "h = self.norm(h)", "h += x", "return h"),
        form("OfAnotherShape", "h = self.norm(h)", "h = h + x[0]", "return h"),
        form("OfANumber", "return self.norm(h) + 1.5"),
        form("OfTwoNorms", "return self.norm(h) + self.other(x)"),
        # The sum before a norm is computed with the norm already.
        form("OfASum", "h = h + x", "return x + self.norm(h)"),
    ],
)
def test_what_is_no_sum_of_a_norms_result_alone(cls: Any, added: Counted) -> None:
    module, patched = twins(cls())
    x = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(patched(x.clone()), module(x.clone()))
    assert added.counts() == (0,)


@pytest.mark.parametrize(
    ("norm", "x", "residual", "count"),
    [
        (GemmaRMSNorm, torch.bfloat16, torch.bfloat16, 1),
        (LlamaRMSNorm, torch.bfloat16, torch.bfloat16, 1),
        (T5LayerNorm, torch.bfloat16, torch.bfloat16, 1),
        # As under autocast; a norm that rounds rows first would round them to the residual's type.
        (GemmaRMSNorm, torch.bfloat16, torch.float32, 1),
        (LlamaRMSNorm, torch.bfloat16, torch.float32, 0),
        (GemmaRMSNorm, torch.float32, torch.bfloat16, 0),
        (GemmaRMSNorm, torch.float64, torch.float64, 0),
    ],
)
def test_types_of_a_norm_and_a_residual(
    norm: Any, x: torch.dtype, residual: torch.dtype, count: int, added: Counted
) -> None:
    module, patched = twins(
        written(Branch, "Added", "def forward(self, x, r):", "return r + self.norm(x)", names={})(norm).to(x)
    )
    operands = torch.randn(2, 3, WIDTH).to(x), torch.randn(2, 3, WIDTH).to(residual)
    # One rounding to bf16 instead of two.
    torch.testing.assert_close(patched(*operands), module(*operands), rtol=1.6e-2, atol=1e-2)
    assert added.counts() == (count,)


def test_short_sums_and_batch_invariant_ones_are_added_alone(added: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    _, patched = twins(PLAINLY())
    x = torch.randn(2, 3, WIDTH)
    with normforge.batch_invariant():
        patched(x)
    for least in (x.numel() + 1, x.numel()):
        assert added.counts() == (0,)
        monkeypatch.setenv("NORMFORGE_FUSE_FROM", str(least))
        patched(x)
    assert added.counts() == (1,)


def test_gradients_of_a_sum_behind_a_norm(added: Counted) -> None:
    module, patched = twins(PLAINLY(GemmaRMSNorm))
    x = torch.randn(2, 3, WIDTH)
    module.other = patched.other = torch.nn.Identity()
    for one, other in zip(results(patched, x), results(module, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert added.counts() == (1,)


@pytest.mark.usefixtures("added")
def test_a_sum_that_no_kernel_serves_is_added_alone(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    module, patched = twins(PLAINLY())
    x = torch.randn(2, 3, WIDTH)
    monkeypatch.setattr(post_add, "normalise", refused)
    for _ in range(2):
        torch.testing.assert_close(patched(x), module(x))
    assert caplog.text.count("a residual add and LlamaRMSNorm are left two kernels: no kernel") == 1


@pytest.mark.parametrize("kind", ["pre", "changing output", "backward"])
def test_hooks_on_a_norm_before_a_sum_are_called(kind: str, added: Counted) -> None:
    module, patched = twins(PLAINLY())
    seen: list[list[Any]] = [[], []]
    x = torch.randn(2, 3, WIDTH)
    for each, found in zip((module, patched), seen, strict=True):
        HOOKS[kind](each.norm, found)
        loss: torch.Tensor = each(x).square().sum()
        backward(loss)
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(patched(x), module(x))
    assert added.counts() == (0,)


def test_a_compiled_graph_shows_the_norm_and_the_sum(added: Counted) -> None:
    module, patched = twins(PLAINLY())
    x = torch.randn(2, 3, WIDTH)
    compiled: Any = torch.compile(patched, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))
    assert added.counts() == (0,)


def refused(*_: Any) -> None:
    raise NormforgeError("no kernel")

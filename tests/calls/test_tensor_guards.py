"""Guards, TorchDynamo's and those that take their place, tell tensors and their surroundings from each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import normforge
from normforge.errors import LayoutError
from normforge.selection import dispatch
from normforge.upstream import dynamo_guards
from normforge.upstream.dynamo_guards import by_attributes, guard

from ..calling import ORACLE, agree

M, N = 3, 64

each_guard = pytest.mark.parametrize("make", [guard, by_attributes])


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for what it calls
    """One that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


@each_guard
def test_several_at_once_do_not_fit(make: Callable[..., Any]) -> None:
    """As autograd's batched gradients are, which are no tensors of a transform of torch.func."""
    fits, found = make([torch.zeros(M, N), torch.zeros(N)], [[None, N], [N]], [[N, 1], [1]]), []

    def within(rows: torch.Tensor) -> torch.Tensor:
        found.append(fits(rows, torch.zeros(N)))
        return rows

    batched: Any = torch._vmap_internals._vmap(within)
    batched(torch.zeros(2, M, N))
    assert found == [False]


@pytest.mark.parametrize("make", [dynamo_guards._inner(), by_attributes])
def test_both_tell_apart_what_differs_wherever_they_are_first_asked(make: Callable[..., Any]) -> None:
    for around in (nullcontext, Mode, FakeTensorMode, torch.inference_mode):
        dynamo_guards._tells_apart.cache_clear()
        with around():
            assert dynamo_guards._tells_apart(make)


@pytest.fixture(params=["inner", "missing", "wrong"])
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """TorchDynamo's as they are, missing, and of a release where they say yes to everything."""
    kind: str = request.param
    monkeypatch.setattr(dispatch, "plans", {})
    if kind == "missing":
        monkeypatch.setattr(dynamo_guards, "_inner", lambda: None)
    elif kind == "wrong":
        monkeypatch.setattr(dynamo_guards, "_inner", lambda: lambda tensors, sizes, strides: lambda *others: True)
    return kind


@pytest.mark.usefixtures("guards")
def test_an_output_over_a_vector_is_refused_by_whichever_guards() -> None:
    x, weight = torch.randn(N), torch.randn(N)
    normforge.layernorm2d_fwd(x, weight, out=torch.zeros(N))
    with pytest.raises(LayoutError, match="out overlaps weight"):
        normforge.layernorm2d_fwd(x, weight, out=weight)


@pytest.mark.usefixtures("guards")
def test_calls_are_known_and_right_by_whichever_guards(checked: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(M, N), torch.randn(N)
    for operand in (weight, weight.bfloat16(), torch._neg_view(weight), weight):
        agree(normforge.layernorm2d_fwd(x, operand), ORACLE["layer"](x, operand))
    # The first three; the last is known.
    assert len(checked) == 3

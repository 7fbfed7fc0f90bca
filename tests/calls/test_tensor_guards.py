"""Guards, TorchDynamo's and those that take their place, tell tensors and their surroundings from each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import normforge
from normforge.calls.known import Known, Patterns
from normforge.errors import LayoutError
from normforge.selection import dispatch
from normforge.upstream import dynamo_guards
from normforge.upstream.dynamo_guards import by_attributes, guard

from ..calling import ORACLE, agree

M, N = 3, 64

each_guard = pytest.mark.parametrize("make", [guard, by_attributes])


class Subclass(torch.Tensor):
    """One that changes nothing."""


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for what it calls
    """One that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def fits_usual(make: Callable[..., Any]) -> Callable[..., bool]:
    fits: Callable[..., bool] = make([torch.zeros(M, N), torch.zeros(N)], [[None, N], [N]], [[N, 1], [1]])
    return fits


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "dtype": lambda: torch.zeros(M, N, dtype=torch.bfloat16),
    "device": lambda: torch.zeros(M, N, device="meta"),
    "trained": lambda: torch.zeros(M, N, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(M, N), requires_grad=False),
    "subclass": lambda: torch.zeros(M, N).as_subclass(Subclass),
    "negated": lambda: torch._neg_view(torch.zeros(M, N)),
    "gaps": lambda: torch.zeros(M, 2 * N)[:, :N],
    "transposed": lambda: torch.zeros(N, M).T,
    "longer": lambda: torch.zeros(M, N + 1),
    "three dimensions": lambda: torch.zeros(1, M, N),
    "one dimension": lambda: torch.zeros(N),
    "fake": lambda: FakeTensorMode().from_tensor(torch.zeros(M, N)),
}


@each_guard
def test_as_many_rows_as_one_likes_fit(make: Callable[..., Any]) -> None:
    fits = fits_usual(make)
    assert all(fits(torch.zeros(m, N), torch.zeros(N)) for m in (1, M, 1000))


@pytest.mark.parametrize("name", OTHERS)
@each_guard
def test_what_differs_does_not_fit(make: Callable[..., Any], name: str) -> None:
    assert not fits_usual(make)(OTHERS[name](), torch.zeros(N))


@each_guard
def test_several_at_once_do_not_fit(make: Callable[..., Any]) -> None:
    """As autograd's batched gradients are, which are no tensors of a transform of torch.func."""
    fits, found = fits_usual(make), []

    def within(rows: torch.Tensor) -> torch.Tensor:
        found.append(fits(rows, torch.zeros(N)))
        return rows

    batched: Any = torch._vmap_internals._vmap(within)
    batched(torch.zeros(2, M, N))
    assert found == [False]


def test_whether_guards_are_right_does_not_depend_on_where_it_is_first_asked() -> None:
    make = dynamo_guards._inner()
    assert make is not None
    for around in (Mode, FakeTensorMode, torch.inference_mode):
        dynamo_guards._tells_apart.cache_clear()
        with around():
            assert dynamo_guards._tells_apart(make)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a mode": lambda: Mode(),  # type: ignore[no-untyped-call]  # likewise
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@each_guard
def test_other_surroundings_do_not_fit(make: Callable[..., Any], name: str) -> None:
    fits, x, weight = fits_usual(make), torch.zeros(M, N), torch.zeros(N)
    with SURROUNDINGS[name]():
        assert not fits(x, weight)
    with torch.no_grad():
        assert fits(x, weight)


@each_guard
def test_within_a_transform_nothing_fits(make: Callable[..., Any]) -> None:
    fits, x, weight, found = fits_usual(make), torch.zeros(M, N), torch.zeros(N), []

    def within(row: torch.Tensor) -> torch.Tensor:
        found.append(fits(x, weight))
        return row

    torch.func.vmap(within)(x)
    assert found == [False]


def test_an_output_that_is_an_input_is_another_kind() -> None:
    x, other = torch.zeros(M, N), torch.zeros(M, N)
    any_rows: Patterns = [([None, N], [N, 1])] * 2
    in_place, apart = Known((x, x), any_rows), Known((x, other), any_rows)
    assert in_place.fits(other, other)
    assert not in_place.fits(x, other)
    assert apart.fits(other, x)


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

"""What of a call is looked at each time, by known calls in C and in Python, by guards, and for compiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import normforge
from normforge import settings
from normforge.calls import native, road
from normforge.calls.check import check_normalised
from normforge.calls.native import Lookup
from normforge.codegen.values import Cast
from normforge.errors import LayoutError
from normforge.families import plain
from normforge.families.plain_calls import is_plain
from normforge.selection import dispatch
from normforge.upstream import dynamo_guards, triton_launcher
from normforge.upstream.dynamo_guards import by_attributes, guard
from proving.cold_warm.contexts import CONTEXTS

from ..calling import ORACLE, agree, table_at

M, N = 3, 64
OPTIONS: tuple[Any, ...] = ("layer", 1e-5, 0.0, None, "after_weight")


@pytest.fixture
def started(nothing_known: None) -> None:
    """Calls that are found in C; none is known."""
    native.start()
    assert not isinstance(native.calls.recorded, Lookup)


def operands() -> Any:
    return [torch.randn(shape, requires_grad=True) for shape in ((M, N), N, N, (M, N), N)]


def at(place: int, value: Any) -> Callable[[Any], Any]:
    """Calls whose operand at a place is another one."""
    return lambda given: [*given[:place], value, *given[place + 1 :]]


def with_x(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda given: [make(given[0].detach()).requires_grad_(), *given[1:]]


Change = Callable[[Any], Any]
TABLES: dict[str, dict[str, Any]] = table_at(Path(__file__).with_name("native_calls.yaml"), {"Cast": Cast, **globals()})
SERVED_IN_GRAPHS = TABLES["served in graphs"]
# By what differs from a plain and known call: an operand, the options, or the shape.
OTHER: dict[str, tuple[Change, tuple[Any, ...], Any]] = {
    **{name: (change, OPTIONS, (N,)) for name, change in {**TABLES["operands"], **SERVED_IN_GRAPHS}.items()},
    **{name: (list, options, (N,)) for name, options in TABLES["options"].items()},
    **{name: (list, OPTIONS, shape) for name, shape in TABLES["shapes"].items()},
    "an offset of a weight that is not there": (at(1, None), ("rms", 1e-5, 1.0, *OPTIONS[3:]), (N,)),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_call_is_not_plain(name: str) -> None:
    change, options, shape = OTHER[name]
    assert is_plain(operands(), (N,), OPTIONS)
    assert is_plain(change(operands()), shape, options) == (name in SERVED_IN_GRAPHS)


@pytest.mark.parametrize(
    ("norm", "eps", "offset", "cast"),
    [
        ("layer", 1e-5, 0.0, "after_weight"),
        ("layer", 0.0, 0.0, "before_weight"),
        ("rms", None, 0.0, "after_weight"),
        ("rms", 1e-6, 1.0, "before_weight"),
    ],
)
def test_what_models_call_is_plain(norm: str, eps: float | None, offset: float, cast: str) -> None:
    """And `check_normalised` passes the call: compiled code asks nothing else of it."""
    floats = (torch.float16, torch.bfloat16, torch.float32)
    options = (norm, eps, offset, None, cast)
    for dtype, vectors, adds, shape in product(floats, floats, (False, True), ((N,), [N], torch.Size((N,)))):
        x, residual = torch.zeros(2, M, N, dtype=dtype)
        vector = torch.nn.Parameter(torch.zeros(N, dtype=vectors))
        given = (x, vector, vector, residual if adds else None, vector.detach())
        assert is_plain(given, shape, options)
        passed = road.named(plain.CALLS, given, options)
        if eps is None:
            del passed["eps"]
        assert check_normalised(plain.CALLS.functions[norm], passed, shape, kernel=True) == (N,)


def test_it_is_as_plain_to_whoever_follows_the_call() -> None:
    """TorchDynamo knows less of some values in some releases of torch, and what it does not know is not plain."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(N))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
            weight, options = self.weight, ("rms", self.eps, 0.0, None, "before_weight")
            return x + 1, is_plain((x, weight, None, x, None), weight.shape, options)

    torch._dynamo.reset()
    _, found = torch.compile(Module(), backend="eager", fullgraph=True)(torch.zeros(M, N))
    assert found


@pytest.mark.usefixtures("started")
def test_without_a_compiler_calls_are_found_in_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(**_: Any) -> None:
        raise FileNotFoundError("no compiler")

    monkeypatch.setattr(triton_launcher, "load", load)
    monkeypatch.setattr(triton_launcher, "_module", None)
    triton_launcher._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="normforge"):
        monkeypatch.setattr(native, "calls", native.calls_among(dispatch, native.makes(build=True), native._records))
    assert "not in C, and kernels are launched by Triton's launcher (FileNotFoundError: no compiler)" in caplog.text
    x = torch.randn(M, N)
    assert torch.equal(normforge.layer_norm(x, (N,)), normforge.layer_norm(x, (N,)))


@pytest.mark.parametrize(("variable", "value"), [("NORMFORGE_NATIVE_LAUNCHER", "0"), ("NORMFORGE_FROZEN", "1")])
def test_it_is_not_compiled_where_that_is_not_wanted(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(triton_launcher, "_module", None)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        assert native.makes(build=not settings.frozen()) is Lookup
    assert not list(tmp_path.rglob("*.so"))


each_guard = pytest.mark.parametrize("make", [guard, by_attributes])


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
    for around in ("", "dispatch mode", "fake", "inference"):
        dynamo_guards._tells_apart.cache_clear()
        with CONTEXTS[around]():
            assert dynamo_guards._tells_apart(make)


@pytest.fixture(params=["inner", "missing", "wrong"])
def guards(request: pytest.FixtureRequest, nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """TorchDynamo's as they are, missing, and of a release where they say yes to everything."""
    kind: str = request.param
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

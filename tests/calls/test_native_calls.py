"""Known calls in C: what is found is what Python finds, and other calls are known to neither."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import normforge
from normforge import settings
from normforge.calls import native
from normforge.calls.lookup import Lookup
from normforge.calls.outputs import packing
from normforge.calls.plan import Plan, Sized
from normforge.families import plain as recorded
from normforge.families import public
from normforge.families.operands import Operands
from normforge.selection import dispatch
from normforge.upstream import native_launcher

from ..stand_in_cuda import NEEDS_A_COMPILER

pytestmark = NEEDS_A_COMPILER

M, N = 3, 64
PYTHON = native.calls_among(dispatch, Lookup, native._records)
OPTIONS: tuple[Any, ...] = ("layer", 1e-5, 0.0, None, "after_weight")
RMS: tuple[Any, ...] = ("rms", None, 1.0, None, "after_weight")


@pytest.fixture(autouse=True)
def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    native.start()
    assert not isinstance(native.calls.recorded, Lookup)
    monkeypatch.setattr(dispatch, "plans", {})


def found(operands: Operands, options: Any) -> Any:
    """The key of a call, whether it is recorded, and what launches are told of it: of Python, and of C alike."""
    expected = PYTHON.recorded.find(operands, options)
    assert native.calls.recorded.find(operands, options) == expected
    return expected


def is_served(operands: Operands, options: Any, normalized: Any) -> bool:
    """Whether a call that is to normalise the dimensions `normalized` is known: to Python, and to C alike."""
    ours, python = (each.recorded.normalise(operands, options, normalized) for each in (native.calls, PYTHON))
    assert (ours is None) == (python is None)
    return ours is not None


def rows(*shape: int, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(shape or (M, N), requires_grad=requires_grad)


def vector() -> torch.Tensor:
    return torch.randn(N, requires_grad=True)


def made_known(operands: Operands, options: Any) -> None:
    norm, eps, *others = options
    recorded.normalise(operands, (N,), (norm, 1e-5 if eps is None else eps, *others))


# Operands of calls that Python finds as well, and their options.
KNOWN: dict[str, tuple[Callable[[], Operands], Any]] = {
    "x alone": (lambda: (rows(), None, None, None, None), OPTIONS),
    "plain": (lambda: (rows(), vector(), vector(), None, None), OPTIONS),
    "a bias of x": (lambda: (rows(), vector(), None, None, vector()), OPTIONS),
    "with a residual": (lambda: (rows(), vector(), vector(), rows(), None), OPTIONS),
    "an offset, eps by default": (lambda: (rows(), vector(), None, None, None), RMS),
    "three dimensions": (lambda: (rows(2, M, N), vector(), vector(), rows(2, M, N), None), OPTIONS),
    "one": (lambda: (rows(N), vector(), None, None, None), OPTIONS),
    "rows with gaps": (lambda: (rows(M, 2 * N)[:, :N].detach(), vector(), vector(), None, None), OPTIONS),
    "frozen": (lambda: (rows(requires_grad=False), None, None, None, None), OPTIONS),
}


@pytest.mark.parametrize("gradients", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("name", KNOWN)
def test_what_python_finds_is_found(name: str, gradients: bool) -> None:
    operands, options = KNOWN[name]
    with torch.set_grad_enabled(gradients):
        given = operands()
        assert found(given, options)[2] is None
        made_known(given, options)
        _, records, told = found(given, options)
        assert records is (gradients and name != "frozen")
        assert told is not None
        for normalized in ((N,), [N], torch.Size((N,))):
            assert is_served(given, options, normalized)
        # A residual's call need not say which dimensions; another one has to.
        assert is_served(given, options, None) == (given[3] is not None)
        # Of other tensors of the same kind their own addresses, and nothing that is kept.
        assert found(operands(), options)[2] not in (None, told)


PLAIN = KNOWN["plain"][0]


def same(operands: Operands) -> Operands:
    return operands


def with_x(make: Callable[[torch.Tensor], Any]) -> Callable[[Operands], Operands]:
    return lambda operands: (make(operands[0]), *operands[1:])


# What differs from a call that is known in no key, and has to be looked at.
OTHER: dict[str, tuple[Callable[[Operands], Operands], Any, Any]] = {
    "a subclass": (with_x(lambda x: x.detach().as_subclass(type("Own", (torch.Tensor,), {}))), OPTIONS, None),
    "no tensor": (with_x(lambda x: [1.0] * N), OPTIONS, None),
    "a sparse tensor": (with_x(lambda x: x.detach().to_sparse().requires_grad_()), OPTIONS, None),
    "negated": (with_x(lambda x: torch._neg_view(x.detach()).requires_grad_()), OPTIONS, None),
    "another dtype": (with_x(lambda x: x.detach().double().requires_grad_()), OPTIONS, None),
    "no rows": (with_x(lambda x: x[:0].detach().requires_grad_()), OPTIONS, None),
    "misaligned": (with_x(lambda x: torch.randn(M * N + 1)[1:].view(M, N).requires_grad_()), OPTIONS, None),
    "a shorter weight": (lambda given: (given[0], torch.randn(8, requires_grad=True), *given[2:]), OPTIONS, None),
    "an eps of True": (same, ("layer", True, *OPTIONS[2:]), None),
    "an eps below 0": (same, ("layer", -1e-5, *OPTIONS[2:]), None),
    "an eps of nan": (same, ("layer", float("nan"), *OPTIONS[2:]), None),
    "an eps beyond fp32": (same, ("layer", 1e300, *OPTIONS[2:]), None),
    "no eps": (same, ("layer", None, *OPTIONS[2:]), None),
    "an offset that LayerNorm lacks": (same, ("layer", 1e-5, 1.0, *OPTIONS[3:]), None),
    "an offset of 0": (same, ("layer", 1e-5, 0, *OPTIONS[3:]), None),
    "options that cannot be hashed": (same, (*OPTIONS[:4], []), None),
    "a shape of floats": (same, OPTIONS, (float(N),)),
    "a shape that is true": (same, OPTIONS, (True,)),
    "a shape of two": (same, OPTIONS, (M, N)),
    "another shape": (same, OPTIONS, (N + 1,)),
    "a dictionary": (same, OPTIONS, {N: N}),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_call_is_not_found(name: str) -> None:
    operands = PLAIN()
    made_known(operands, OPTIONS)
    change, options, normalized = OTHER[name]
    assert is_served(operands, OPTIONS, (N,))
    assert not is_served(change(operands), options, normalized or (N,))
    assert normalized or found(change(operands), options)[2] is None


def test_a_residual_of_other_rows_is_not_found() -> None:
    x, weight, bias, residual, x_bias = KNOWN["with a residual"][0]()
    made_known((x, weight, bias, residual, x_bias), OPTIONS)
    assert found((x, weight, bias, rows(M + 1, N), x_bias), OPTIONS)[2] is None


# Made by `type`, as torch declares no types of what a subclass's statement calls.
Seeing: Callable[[], Any] = type("Seeing", (TorchDispatchMode,), {})

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a mode that sees operators": Seeing,
    "a level of forward-mode AD": forward_ad.dual_level,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=[name.replace(" ", "_") for name in SURROUNDINGS])
def test_nothing_is_found_where_something_watches(around: Callable[[], AbstractContextManager[object]]) -> None:
    operands = PLAIN()
    made_known(operands, OPTIONS)
    with torch.no_grad():
        made_known(operands, OPTIONS)
    with around():
        assert found(operands, OPTIONS)[2] is None


def test_callers_may_see_other_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = PLAIN()
    made_known(operands, OPTIONS)
    monkeypatch.setattr(dispatch, "plans", type("Others", (dict,), {})(dispatch.plans))
    assert found(operands, OPTIONS)[2] is not None


@pytest.mark.parametrize("given", [(), (1, 2, 3), ((), (), (), ())], ids=["nothing", "no tuples", "too much"])
def test_arguments_of_another_kind_are_refused(given: Any) -> None:
    function: Any = native.calls.recorded.normalise
    with pytest.raises(TypeError, match="a recorded fwd call is looked up by two tuples"):
        function(*given)
    named: Any = native.calls.layernorm2d_fwd
    with pytest.raises(TypeError, match="layernorm2d_fwd takes 19 arguments, and not"):
        named(*given)


def test_a_table_that_is_not_whole_is_refused() -> None:
    make: Any = type(native.calls.recorded)
    with pytest.raises(TypeError, match="a look-up is made without"):
        make(head="alone")


X = torch.randn(M, N)
DEEP = torch.randn(2, M, N)


def each_call(name: str) -> Any:
    """Call a function of a family twice, and return what C and Python find of the second call."""
    calls: dict[str, Callable[[], object]] = {
        "gated": lambda: normforge.gated_rms_norm(X, X.clone(), torch.ones(N)),
        "modulated": lambda: normforge.modulated_layer_norm(DEEP, torch.zeros(2, N), torch.zeros(2, N)),
        "quantised": lambda: normforge.quantised_rms_norm(X, torch.ones(N), out_dtype=torch.int8),
    }
    given: list[tuple[Any, ...]] = []
    own = getattr(native.calls, name)

    class Noting:
        def find(self, *pair: Any) -> Any:
            given.append(pair)
            return own.find(*pair)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "calls", SimpleNamespace(**vars(native.calls) | {name: Noting()}))
        calls[name]()
        calls[name]()
    return own.find(*given[-1]), getattr(PYTHON, name).find(*given[-1])


@pytest.mark.parametrize("name", ["gated", "modulated", "quantised"])
def test_calls_of_other_families_are_found_as_python_finds_them(name: str) -> None:
    ours, expected = each_call(name)
    assert ours == expected
    assert ours[2] is not None


WEIGHT = torch.ones(N)
FUNCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("layernorm2d_fwd", {"x": X, "weight": WEIGHT}),
    "offset": ("rmsnorm2d_fwd", {"x": X, "weight": WEIGHT, "weight_offset": 1.0}),
    "added, quantised": ("rmsnorm2d_fwd", {"x": X, "residual": X.clone(), "fadd": 1, "fquant": 2, "save_mv": True}),
    "three dimensions": ("layernorm2d_fwd", {"x": DEEP, "residual": DEEP.clone(), "fadd": "pre_add", "save_mv": True}),
    "gaps": ("layernorm2d_fwd", {"x": torch.randn(2, M, 2 * N)[..., :N]}),
    "misaligned": ("layernorm2d_fwd", {"x": torch.randn(M * N + 1)[1:].view(M, N)}),
    "into": ("layernorm2d_fwd", {"x": X, "out": torch.empty(M, N)}),
    "dropout": ("layernorm2d_fwd", {"x": X, "residual": X.clone(), "fadd": 1, "dropout_p": 0.5, "dropout_rng": (1, 2)}),
    "fp8": (
        "layernorm2d_fwd",
        {"x": X.to(torch.float8_e4m3fn), "x_scale": torch.ones(M), "out_dtype": torch.float32},
    ),
    "gradients": ("rmsnorm2d_bwd", {"dy": X, "x": X.clone(), "rstd": torch.ones(M), "wants": ["dx"]}),
    "gradients with means": (
        "layernorm2d_bwd",
        {
            "dy": X,
            "x": X.clone(),
            "weight": WEIGHT,
            "mean": torch.zeros(M),
            "rstd": torch.ones(M),
            "wants": ("dweight",),
        },
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_returns_what_its_look_up_in_python_returns(name: str, checked: list[tuple[int, ...]]) -> None:
    function, given = FUNCTIONS[name]
    call = getattr(public, function)
    expected = call(**given)
    for calls in (native.calls, PYTHON):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "calls", calls)
            for made, wanted in zip(call(**given), expected, strict=True):
                assert (made is None) == (wanted is None)
                assert made is None or torch.equal(made.float(), wanted.float())
    assert len(checked) == 1


def launching(plan: Plan, shape: torch.Size, launch: Callable[..., None]) -> Sized:
    """How a plan's calls of a shape are launched, by address and by another launch."""
    sized = plan._at(shape)
    steps = tuple((launch, grid) for _, grid in sized.layout.steps)
    return sized._replace(layout=sized.layout._replace(steps=steps, by_address=True, in_c=True))


# Grid and values of each launch, and the plan of which they are.
Launched = tuple[list[tuple[Any, ...]], Any, bool]


@pytest.fixture(params=["recorded", "recorded, added"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Launches by address, of the calls that a method is for: nothing runs, and allocations are the same each time."""
    launches: list[tuple[Any, ...]] = []
    kept: dict[Any, list[torch.Tensor]] = {}
    adds = request.param.endswith("added")
    with torch.set_grad_enabled("recorded" in request.param):
        made_known(KNOWN["with a residual" if adds else "plain"][0](), OPTIONS)
        ((kind,),) = dispatch.plans.values()
        plan = kind.plan

        def empty(size: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
            assert type(size) is type(strides) is tuple
            made = [torch.empty_strided(size, strides, dtype=dtype) for _ in range(2)]
            alike = kept.setdefault((size, strides, dtype), made)
            if adds and len(size) > 1:
                # y and the sum in turn.
                alike.reverse()
            return alike[0]

        def at(shape: torch.Size) -> Sized:
            return launching(plan, shape, lambda *given: launches.append(given))

        monkeypatch.setattr(plan, "empty", empty)
        monkeypatch.setattr(plan, "at", at)
        yield launches, plan, adds


@pytest.mark.parametrize("shape", [(M, N), (1, N), (2, M, N)], ids=str)
def test_launches_and_what_they_return_are_those_of_python(shape: tuple[int, ...], launched: Launched) -> None:
    launches, plan, adds = launched
    operands = (rows(*shape), vector(), vector(), rows(*shape) if adds else None, None)
    made_known(operands, OPTIONS)
    launches.clear()
    for kind in [kind for kinds in dispatch.plans.values() for kind in kinds]:
        kind.plan = plan
    records = {"recorded": lambda operands, options, launched: launched}
    both = [native.calls_among(dispatch, make, records) for make in (native.makes(build=True), Lookup)]
    (*made, is_invariant), (*expected, is_expected) = (
        calls.recorded.normalise(operands, OPTIONS, (N,)) for calls in both
    )
    assert is_invariant is is_expected is False
    there = [each for each in made if each is not None]
    assert len({*map(id, there)}) == len(there) == 2 + adds
    assert [*map(id, made)] == [*map(id, expected)]
    first, second = launches
    assert first == second


# How many operands autograd is shown of each that is known: a residual's call all five, others none at the end.
PASSED = {
    "x alone": 2,
    "plain": 3,
    "a bias of x": 4,
    "with a residual": 5,
    "an offset, eps by default": 2,
    "three dimensions": 5,
    "one": 2,
    "rows with gaps": 3,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_call_is_recorded_as_python_records_it(name: str) -> None:
    given: list[tuple[Any, ...]] = []
    applies: Any = [lambda *passed, which=which: given.append((which, *passed)) for which in (0, 1)]
    records = {"recorded": recorded._recording(*applies)}
    both = [native.calls_among(dispatch, make, records) for make in (native.makes(build=True), Lookup)]
    make, options = KNOWN[name]
    operands = make()
    for calls in both:
        assert calls.recorded.normalise(operands, options, None) is None
    made_known(operands, options)
    for calls in both:
        calls.recorded.normalise(operands, options, (N,))
    if name == "frozen":
        assert given == []
        return
    (*first,), (*second,) = given
    assert first[0] == second[0] == int(operands[3] is not None)
    assert first[1][0] == second[1][0] == options
    assert [*map(id, first[2:])] == [*map(id, second[2:])]
    assert len(first[2:]) == PASSED[name]


@pytest.mark.parametrize("launched", ["alone", "added"], indirect=True)
def test_a_call_that_is_not_recorded_is_launched_at_once(launched: Launched) -> None:
    launches, _, adds = launched
    operands = (rows(), vector(), vector(), rows() if adds else None, None)
    made, expected = (calls.recorded.normalise(operands, OPTIONS, (N,)) for calls in (native.calls, PYTHON))
    if not adds:
        made, expected = (made,), (expected,)
    assert [*map(id, made)] == [*map(id, expected)]
    first, second = launches
    assert first == second


@pytest.mark.parametrize("launched", ["recorded"], indirect=True)
def test_a_launch_that_fails_says_so(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such launch")

    told = found(PLAIN(), OPTIONS)[2]
    plan = launched[1]
    assert told[0] is plan
    monkeypatch.setattr(plan, "at", lambda shape: launching(plan, shape, fail))
    with pytest.raises(RuntimeError, match="no such launch"):
        native.calls.recorded.normalise(PLAIN(), OPTIONS, (N,))


def test_a_launch_writes_to_outputs_that_are_passed_and_counts_that(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    x, residual = torch.randn(2, M, N)

    def call() -> list[torch.Tensor]:
        places = [torch.zeros(M, N), torch.zeros(M, N)]
        public.layernorm2d_fwd(x, residual=residual, fadd=1, save_mv=True, out=places[0], residual_out=places[1])
        return places

    call()
    ((kind,),) = dispatch.plans.values()
    plan = kind.plan
    monkeypatch.setattr(plan, "at", lambda shape: launching(plan, shape, lambda *given: launches.append(given)))
    for calls in (native.calls, PYTHON):
        monkeypatch.setattr(native, "calls", calls)
        places = call()
        assert [place._version for place in places] == [1, 1]
        _, values = launches.pop()
        # Behind the eight addresses of what is read.
        assert values[8:10] == tuple(place.data_ptr() for place in places)


# What is differentiated, by what its backward pass has: whether its norm is LayerNorm, the shape, and which operands.
BACKWARD: dict[str, tuple[bool, tuple[int, ...], tuple[str, ...]]] = {
    "LayerNorm": (True, (M, N), ("weight", "bias")),
    "RMSNorm": (False, (M, N), ("weight",)),
    "three dimensions": (True, (2, M, N), ("weight", "bias")),
    "no weight": (True, (M, N), ()),
    "a bias of x": (False, (M, N), ("weight", "x_bias")),
    "a residual": (True, (M, N), ("weight", "bias", "residual")),
    "a residual of three dimensions": (False, (2, M, N), ("weight", "residual")),
}


def differentiated(name: str) -> tuple[torch.Tensor, ...]:
    """Run a backward pass of a name in BACKWARD, and return the gradients."""
    is_layer, shape, there = BACKWARD[name]
    x = rows(*shape)
    given: dict[str, Any] = {each: rows(*shape) if each == "residual" else vector() for each in there}
    called = (x, *given.values())
    if "residual" in given:
        add = normforge.add_layer_norm if is_layer else normforge.add_rms_norm
        outputs: Any = add(x, given.pop("residual"), **given)
        return torch.autograd.grad(outputs, called, [torch.randn_like(x) for _ in outputs])
    norm = normforge.layer_norm if is_layer else normforge.rms_norm
    return torch.autograd.grad(norm(x, (N,), **given), called, torch.randn_like(x))


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_launched_as_python_launches_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    kept: dict[Any, list[torch.Tensor]] = {}
    arrived: list[tuple[Any, Any]] = []

    def gradients(operands: Any, options: Any) -> Any:
        arrived.append((operands, options))
        return PYTHON.gradients.gradients(operands, options)

    with pytest.MonkeyPatch.context() as patch:
        asking = SimpleNamespace(**vars(PYTHON) | {"gradients": SimpleNamespace(gradients=gradients)})
        patch.setattr(native, "calls", asking)
        differentiated(name)
    ((key, (kind,)),) = [item for item in dispatch.plans.items() if "recorded bwd" in _as_tuple(item[0])]
    ((operands, options),) = arrived
    plan = kind.plan
    sized = plan._at(operands[1].shape)
    made = sized.layout

    def launch(*given: Any) -> None:
        launches.append(given)

    def empty(size: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        assert type(size) is type(strides) is tuple
        asked.append((size, strides, dtype))
        alike = kept.setdefault(asked[-1], [])
        while len(alike) < asked.count(asked[-1]):
            alike.append(torch.empty_strided(size, strides, dtype=dtype))
        return alike[asked.count(asked[-1]) - 1]

    asked: list[Any] = []
    steps = tuple((launch, grid) for _, grid in made.steps)
    finish = None if made.finish is None else (launch, made.finish[1])
    laid = made._replace(steps=steps, finish=finish, by_address=True, exchange=0, in_c=True)
    monkeypatch.setattr(plan, "at", lambda shape: sized._replace(layout=laid))
    monkeypatch.setattr(plan, "empty", empty)
    both = []
    for each in (native.calls, PYTHON):
        asked.clear()
        both.append(each.gradients.gradients(operands, options))
    (first_key, ours), (second_key, expected) = both
    assert first_key == second_key == key
    assert type(ours) is type(expected)
    assert ours is not None
    assert expected is not None
    assert [*map(id, ours)] == [*map(id, expected)]
    half = len(launches) // 2
    assert half == len(steps) + (finish is not None)
    assert launches[:half] == launches[half:]


IMAGES = torch.randn(2, 8, 4, requires_grad=True)
# Calls whose backward passes have rows in parts, by the names of their look-ups.
IN_PARTS: dict[str, Callable[[], torch.Tensor]] = {
    "gated_gradients": lambda: normforge.gated_layer_norm(rows(), rows(), vector(), vector()),
    "modulated_gradients": lambda: normforge.modulated_layer_norm(rows(2, 16, N), rows(2, N), rows(2, N)),
    "group_gradients": lambda: normforge.group_norm(IMAGES, 2, torch.ones(8), torch.zeros(8)),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_gradients_of_parts_are_launched_as_python_launches_them(name: str) -> None:
    launches: list[tuple[Any, ...]] = []
    asked: list[tuple[Any, ...]] = []
    own = getattr(native.calls, name)

    class Noting:
        def known_gradients(self, *given: Any) -> Any:
            asked.append(given)
            return own.known_gradients(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "calls", SimpleNamespace(**vars(native.calls) | {name: Noting()}))
        y = IN_PARTS[name]()
        torch.autograd.backward(y, torch.randn_like(y))
    (given,) = asked
    ((kind,),) = [kinds for key, kinds in dispatch.plans.items() if name.split("_")[0] + " bwd" in _as_tuple(key)]
    ready = kind.plan
    assert [each.known_gradients(*given)[1] is None for each in (own, getattr(PYTHON, name))] == [False, False]

    def launch(*of: Any) -> None:
        launches.append(of)

    kept: list[torch.Tensor] = []
    made: list[torch.Tensor] = []

    def empty(size: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        if not made:
            kept.append(torch.empty_strided(size, strides, dtype=dtype))
        return made.pop(0) if made else kept[-1]

    def at(shape: torch.Size) -> Sized:
        sized: Sized = ready.at(shape)
        layout = sized.layout
        steps = tuple((launch, grid) for _, grid in layout.steps)
        finish = layout.finish and (launch, layout.finish[1])
        return sized._replace(layout=layout._replace(steps=steps, finish=finish, by_address=True, in_c=True))

    kind.plan = ready._replace(plan=SimpleNamespace(empty=empty, n=ready.plan.n), at=at)
    key, expected = getattr(PYTHON, name).known_gradients(*given)
    # The same memory again.
    made += kept
    assert own.known_gradients(*given)[0] == key
    half = len(launches) // 2
    assert launches[:half] == launches[half:]
    assert half > 0
    assert expected is not None
    made += kept
    assert [*map(id, own.known_gradients(*given)[1])] == [*map(id, expected)]
    with pytest.raises(TypeError, match="is looked up by tensors, arguments and what is due"):
        own.known_gradients(*given, None)


def _as_tuple(key: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = key
    return found


def test_gradients_of_another_call_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    differentiated("LayerNorm")
    (plan,) = [kind.plan for key, kinds in dispatch.plans.items() if "recorded bwd" in _as_tuple(key) for kind in kinds]
    sized = plan._at(torch.Size((M, N)))
    interpreted = sized.layout
    launched = interpreted._replace(
        steps=tuple((lambda *_: None, grid) for _, grid in interpreted.steps), finish=None, by_address=True, in_c=True
    )
    monkeypatch.setattr(plan, "at", lambda shape: sized._replace(layout=launched))
    calls = (native.calls.gradients, PYTHON.gradients)
    x, dy = rows(), rows().detach()
    options = ("layer", 0.0, "after_weight", None, torch.float32, ("dx", "dweight", "dbias"))
    statistics = torch.zeros(packing(M, mean=True)[0])
    operands = (dy, x, vector(), statistics, None, None)
    # Of another dtype, of other rows, of none, elsewhere, and with other options.
    for given, said in (
        ((dy.double(), *operands[1:]), options),
        ((dy[:1], *operands[1:]), options),
        ((dy[:0], x[:0], *operands[2:]), options),
        ((torch.zeros(M * N + 1)[1:].view(M, N), *operands[1:]), options),
        (operands, (*options[:-1], ("dx",))),
    ):
        (key, ours), (expected, others) = (each.gradients(given, said) for each in calls)
        assert (key, ours, others) == (expected, None, None)
    for around in SURROUNDINGS.values():
        with around():
            assert [each.gradients(operands, options)[1] for each in calls] == [None, None]
    assert calls[0].gradients(operands, options)[1] is not None

    def fail(*_: Any) -> None:
        raise RuntimeError("no such launch")

    failing = launched._replace(steps=tuple((fail, grid) for _, grid in launched.steps))
    monkeypatch.setattr(plan, "at", lambda shape: sized._replace(layout=failing))
    with pytest.raises(RuntimeError, match="no such launch"):
        calls[0].gradients(operands, options)
    # And what is launched with tensors, or with memory that programs exchange values through, is launched in Python.
    for otherwise in (interpreted, launched._replace(exchange=1, in_c=False)):
        monkeypatch.setattr(plan, "at", lambda shape, layout=otherwise: sized._replace(layout=layout))
        assert calls[0].gradients(operands, options)[1] is not None
    with pytest.raises(TypeError, match="a recorded bwd call is looked up by two tuples"):
        calls[0].gradients((dy, x), options)


def test_without_a_compiler_calls_are_found_in_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: Any) -> None:
        raise FileNotFoundError("no compiler")

    monkeypatch.setattr(native_launcher, "load", load)
    with caplog.at_level(logging.INFO, logger="normforge"):
        monkeypatch.setattr(native, "calls", native.calls_among(dispatch, native.makes(build=True), native._records))
    assert "known calls are found in Python, and not in C (FileNotFoundError: no compiler)" in caplog.text
    x = rows()
    assert torch.equal(normforge.layer_norm(x, (N,)), normforge.layer_norm(x, (N,)))
    with torch.no_grad():
        assert torch.equal(normforge.layer_norm(x, (N,)), normforge.layer_norm(x, (N,)))


@pytest.mark.parametrize(("variable", "value"), [("NORMFORGE_NATIVE_LAUNCHER", "0"), ("NORMFORGE_FROZEN", "1")])
def test_it_is_not_compiled_where_that_is_not_wanted(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, value)
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        assert native.makes(build=not settings.frozen()) is Lookup
    assert not list(tmp_path.rglob("*.so"))


def test_nothing_that_was_found_is_kept() -> None:
    operands = PLAIN()
    made_known(operands, OPTIONS)
    held = [weakref.ref(each) for each in operands if each is not None]
    for _ in range(3):
        assert found(operands, OPTIONS)[2] is not None
        assert found(operands, ("layer", -1.0, *OPTIONS[2:]))[2] is None
    del operands
    gc.collect()
    assert [each() for each in held] == [None] * len(held)

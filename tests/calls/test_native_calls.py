"""Known calls in C: what is found is what Python finds, and other calls are known to neither."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
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
from normforge.calls.plan import Sized
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


def is_served(operands: Operands, options: Any, *normalized: Any) -> bool:
    """Whether a call that is to normalise the dimensions `normalized` is known: to Python, and to C alike."""
    ours, python = (each.recorded.normalise(operands, options, *normalized) for each in (native.calls, PYTHON))
    assert (ours is None) == (python is None)
    return ours is not None


def rows(*shape: int, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(shape or (M, N), requires_grad=requires_grad)


def vector() -> torch.Tensor:
    return torch.randn(N, requires_grad=True)


def plain() -> Operands:
    return rows(), vector(), vector(), None, None


def made_known(operands: Operands, options: Any) -> None:
    norm, eps, *others = options
    recorded.normalise(operands, (N,), (norm, 1e-5 if eps is None else eps, *others))


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
    operands = plain()
    made_known(operands, OPTIONS)
    change, options, normalized = OTHER[name]
    assert is_served(operands, OPTIONS, (N,))
    assert not is_served(change(operands), options, normalized or (N,))
    assert normalized or found(change(operands), options)[2] is None


# Made by `type`, as torch declares no types of what a subclass's statement calls.
Seeing: Callable[[], Any] = type("Seeing", (TorchDispatchMode,), {})

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a mode that sees operators": Seeing,
    "a level of forward-mode AD": forward_ad.dual_level,
    "inference": torch.inference_mode,
}


def asked(name: str, method: str, run: Callable[[], object]) -> tuple[Any, ...]:
    """Run calls that are known, and return what a method of a look-up was given last."""
    run()
    given: list[tuple[Any, ...]] = []
    own = getattr(getattr(native.calls, name), method)

    def noting(*of: Any) -> Any:
        given.append(of)
        return own(*of)

    with pytest.MonkeyPatch.context() as patch:
        its = SimpleNamespace(**{method: noting})
        patch.setattr(native, "calls", SimpleNamespace(**vars(native.calls) | {name: its}))
        run()
    return given[-1]


class Watched:
    """Launches by address, of which none runs, and memory that is the same for every call."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self._asked: list[Any] = []
        self._kept: dict[Any, list[torch.Tensor]] = {}

    def launch(self, *given: Any) -> None:
        self.launches.append(given)

    def empty(self, size: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        assert type(size) is type(strides) is tuple
        kind = (size, strides, dtype)
        self._asked.append(kind)
        alike, at = self._kept.setdefault(kind, []), self._asked.count(kind)
        if len(alike) < at:
            alike.append(torch.empty_strided(size, strides, dtype=dtype))
        return alike[at - 1]

    def sized(self, sized: Sized, **layout: Any) -> Sized:
        """Return how calls are launched, by this."""
        made = sized.layout
        steps = tuple((self.launch, grid) for _, grid in made.steps)
        finish = made.finish and (self.launch, made.finish[1])
        laid = {"steps": steps, "finish": finish, "by_address": True, "in_c": True, **layout}
        return sized._replace(layout=made._replace(**laid))

    def each(self, *calls: Callable[[], Any]) -> list[Any]:
        """Return what calls return, which launch the same."""
        found, launches = [], []
        for call in calls:
            self._asked.clear()
            self.launches = []
            found.append(call())
            launches.append(self.launches)
        assert launches[0] == launches[1]
        assert launches[0]
        return found


def fail(*_: Any) -> None:
    raise RuntimeError("no such launch")


# What launches, the plan of which they are, and whether a residual is added.
Launched = tuple[Watched, Any, bool]


@pytest.fixture(params=[False, True], ids=["alone", "added"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Watched launches of a recorded call, with a residual or without."""
    adds: bool = request.param
    made_known((rows(), vector(), vector(), rows() if adds else None, None), OPTIONS)
    ((kind,),) = dispatch.plans.values()
    plan, watched = kind.plan, Watched()
    monkeypatch.setattr(plan, "empty", watched.empty)
    monkeypatch.setattr(plan, "at", lambda shape: watched.sized(plan._at(shape)))
    return watched, plan, adds


@pytest.mark.parametrize("shape", [(M, N), (1, N), (2, M, N)], ids=str)
def test_launches_and_what_they_return_are_those_of_python(shape: tuple[int, ...], launched: Launched) -> None:
    watched, plan, adds = launched
    operands = (rows(*shape), vector(), vector(), rows(*shape) if adds else None, None)
    made_known(operands, OPTIONS)
    for kind in [kind for kinds in dispatch.plans.values() for kind in kinds]:
        kind.plan = plan
    records = {"recorded": lambda operands, options, launched: launched}
    both = [native.calls_among(dispatch, make, records) for make in (native.makes(build=True), Lookup)]
    (*made, is_invariant), (*expected, is_expected) = watched.each(
        *(partial(calls.recorded.normalise, operands, OPTIONS, (N,)) for calls in both)
    )
    assert is_invariant is is_expected is False
    there = [each for each in made if each is not None]
    assert len({*map(id, there)}) == len(there) == 2 + adds
    assert [*map(id, made)] == [*map(id, expected)]


@pytest.mark.parametrize("launched", [False], indirect=True)
def test_a_launch_that_fails_says_so(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, plan, _ = launched
    assert found(plain(), OPTIONS)[2][0] is plan
    monkeypatch.setattr(watched, "launch", fail)
    with pytest.raises(RuntimeError, match="no such launch"):
        native.calls.recorded.normalise(plain(), OPTIONS, (N,))


def test_a_launch_writes_to_outputs_that_are_passed_and_counts_that(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = torch.randn(2, M, N)

    def call() -> list[torch.Tensor]:
        places = [torch.zeros(M, N), torch.zeros(M, N)]
        public.layernorm2d_fwd(x, residual=residual, fadd=1, save_mv=True, out=places[0], residual_out=places[1])
        return places

    call()
    ((kind,),) = dispatch.plans.values()
    plan, watched = kind.plan, Watched()
    monkeypatch.setattr(plan, "at", lambda shape: watched.sized(plan._at(shape)))
    for calls in (native.calls, PYTHON):
        monkeypatch.setattr(native, "calls", calls)
        places = call()
        assert [place._version for place in places] == [1, 1]
        _, values = watched.launches.pop()
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


def known_kind(word: str) -> tuple[Any, Any]:
    """Return the key and the kind of the one call whose key holds a word."""
    ((key, (kind,)),) = [(key, kinds) for key, kinds in dispatch.plans.items() if word in tuple(key)]  # type: ignore[arg-type]
    return key, kind


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_are_launched_as_python_launches_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = asked("gradients", "gradients", lambda: differentiated(name))
    key, kind = known_kind("recorded bwd")
    plan, watched = kind.plan, Watched()
    sized = watched.sized(plan._at(given[0][1].shape), exchange=0)
    monkeypatch.setattr(plan, "at", lambda shape: sized)
    monkeypatch.setattr(plan, "empty", watched.empty)
    (first_key, ours), (second_key, expected) = watched.each(
        *(partial(calls.gradients.gradients, *given) for calls in (native.calls, PYTHON))
    )
    assert first_key == second_key == key
    assert type(ours) is type(expected)
    assert ours is not None
    assert [*map(id, ours)] == [*map(id, expected)]
    assert len(watched.launches) == len(sized.layout.steps) + (sized.layout.finish is not None)


IMAGES = torch.randn(2, 8, 4, requires_grad=True)
# Calls whose backward passes have rows in parts, by the names of their look-ups.
IN_PARTS: dict[str, Callable[[], torch.Tensor]] = {
    "gated_gradients": lambda: normforge.gated_layer_norm(rows(), rows(), vector(), vector()),
    "modulated_gradients": lambda: normforge.modulated_layer_norm(rows(2, 16, N), rows(2, N), rows(2, N)),
    "group_gradients": lambda: normforge.group_norm(IMAGES, 2, torch.ones(8), torch.zeros(8)),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_gradients_of_parts_are_launched_as_python_launches_them(name: str) -> None:
    def differentiated() -> None:
        y = IN_PARTS[name]()
        torch.autograd.backward(y, torch.randn_like(y))

    given = asked(name, "known_gradients", differentiated)
    _, kind = known_kind(f"{name.split('_')[0]} bwd")
    ready, watched = kind.plan, Watched()
    both = [getattr(calls, name) for calls in (native.calls, PYTHON)]
    assert [each.known_gradients(*given)[1] is None for each in both] == [False, False]
    plan = SimpleNamespace(empty=watched.empty, n=ready.plan.n)
    kind.plan = ready._replace(plan=plan, at=lambda shape: watched.sized(ready.at(shape)))
    (key, ours), (expected_key, expected) = watched.each(*(partial(each.known_gradients, *given) for each in both))
    assert key == expected_key
    assert expected is not None
    assert [*map(id, ours)] == [*map(id, expected)]
    with pytest.raises(TypeError, match="is looked up by tensors, arguments and what is due"):
        both[0].known_gradients(*given, None)


def test_gradients_of_another_call_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    differentiated("LayerNorm")
    plan, watched = known_kind("recorded bwd")[1].plan, Watched()
    sized = plan._at(torch.Size((M, N)))
    monkeypatch.setattr(plan, "at", lambda shape: watched.sized(sized, finish=None))
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

    # What is launched with tensors, or with memory that programs exchange values through, is launched in Python.
    for otherwise in (sized, watched.sized(sized, finish=None, exchange=1, in_c=False)):
        monkeypatch.setattr(plan, "at", lambda shape, its=otherwise: its)
        assert calls[0].gradients(operands, options)[1] is not None
    monkeypatch.setattr(watched, "launch", fail)
    monkeypatch.setattr(plan, "at", lambda shape: watched.sized(sized, finish=None))
    with pytest.raises(RuntimeError, match="no such launch"):
        calls[0].gradients(operands, options)
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
    operands = plain()
    made_known(operands, OPTIONS)
    held = [weakref.ref(each) for each in operands if each is not None]
    for _ in range(3):
        assert found(operands, OPTIONS)[2] is not None
        assert found(operands, ("layer", -1.0, *OPTIONS[2:]))[2] is None
    del operands
    gc.collect()
    assert [each() for each in held] == [None] * len(held)

"""Known calls in C: what is found is what Python finds, and whatever is another call is left to Python."""

from __future__ import annotations

import dataclasses
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
from normforge.calls import native, recorded
from normforge.calls.outputs import packing
from normforge.calls.plan import Forward
from normforge.calls.straight import Operands, find_gradients, find_recorded
from normforge.selection import dispatch
from normforge.upstream import native_launcher
from normforge.upstream.torch_autograd import applied_at_once

from ..stand_in_cuda import NEEDS_A_COMPILER

pytestmark = NEEDS_A_COMPILER

M, N = 3, 64
PYTHON = native.InPython(applied_at_once(recorded._Normalise), applied_at_once(recorded._AddNormalise))
OPTIONS: tuple[Any, ...] = ("layer", 1e-5, 0.0, None, "after_weight")
RMS: tuple[Any, ...] = ("rms", None, 1.0, None, "after_weight")


@pytest.fixture(autouse=True)
def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    native.start()
    assert not isinstance(native.calls, native.InPython)
    monkeypatch.setattr(dispatch, "plans", {})


def found_in_c(operands: Operands, options: Any, normalized: Any) -> Any:
    """Whether a call is recorded and what launches are told of it; None if C leaves it to Python.

    No kernel is launched by address here, and of all others it is Python that launches.
    """
    if normalized is None and operands[3] is None:
        # Of a sum alone nothing has to be said.
        normalized = (N,)
    python: Any = SimpleNamespace(
        normalise=lambda *_: None,
        apply=lambda told, *_: (True, told[1]),
        apply_add=lambda told, *_: (True, told[1]),
        run_alone=lambda found: (False, found),
        run_added=lambda found: (False, found),
    )
    return native.calls_among(dispatch, python).normalise(operands, options, normalized)


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
        assert found_in_c(given, options, None) is None
        made_known(given, options)
        for normalized in (None, (N,), [N], torch.Size((N,))):
            _, records, found = find_recorded(given, options, normalized)
            assert found is not None
            assert found_in_c(given, options, normalized) == (records, found)
        # Of other tensors of the same kind their own addresses, and nothing that is kept.
        assert found_in_c(operands(), options, None) != (records, found)


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
    assert found_in_c(operands, OPTIONS, (N,)) is not None
    assert found_in_c(change(operands), options, normalized) is None


def test_a_residual_of_other_rows_is_not_found() -> None:
    x, weight, bias, residual, x_bias = KNOWN["with a residual"][0]()
    made_known((x, weight, bias, residual, x_bias), OPTIONS)
    assert found_in_c((x, weight, bias, rows(M + 1, N), x_bias), OPTIONS, None) is None


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
        assert found_in_c(operands, OPTIONS, None) is None


def test_callers_that_see_other_plans_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = PLAIN()
    made_known(operands, OPTIONS)
    monkeypatch.setattr(dispatch, "plans", type("Others", (dict,), {})(dispatch.plans))
    assert found_in_c(operands, OPTIONS, None) is None
    assert find_recorded(operands, OPTIONS)[2] is not None


@pytest.mark.parametrize("given", [(), (1, 2, 3), ((), (), (), ())], ids=["nothing", "no tuples", "too much"])
def test_arguments_of_another_kind_are_refused(given: Any) -> None:
    function: Any = native.calls.normalise
    with pytest.raises(TypeError, match="a call is looked up by its operands, its options and a shape"):
        function(*given)


# Grid and values of each launch, the plan of which they are, and the method that launches by it.
Launched = tuple[list[tuple[Any, ...]], Any, str]


@pytest.fixture(params=["run_recorded_alone", "run_recorded_added"])
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

        def forward(m: int) -> Forward:
            return lambda *given: launches.append(given), *plan._forward(m)[1:]

        monkeypatch.setattr(plan, "empty", empty)
        monkeypatch.setattr(plan, "forward", forward)
        yield launches, plan, request.param


@pytest.mark.parametrize("shape", [(M, N), (1, N), (2, M, N)], ids=str)
def test_launches_and_what_they_return_are_those_of_python(shape: tuple[int, ...], launched: Launched) -> None:
    launches, plan, method = launched
    operands = (rows(*shape), vector(), vector(), rows(*shape) if method.endswith("added") else None, None)
    made_known(operands, OPTIONS)
    launches.clear()
    known = find_recorded(operands, OPTIONS)[2]
    assert known is not None
    found = (plan, *known[1:])
    made, expected = (getattr(calls, method)(found) for calls in (native.calls, PYTHON))
    assert len({*map(id, made)}) == len(made)
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
    python = native.InPython(*[lambda *passed, which=which: given.append((which, *passed)) for which in (0, 1)])
    calls = native.calls_among(dispatch, python)
    assert not isinstance(calls, native.InPython)
    make, options = KNOWN[name]
    operands = make()
    assert calls.normalise(operands, options, None) is None
    made_known(operands, options)
    for each in (calls, python):
        each.normalise(operands, options, (N,))
    if name == "frozen":
        assert given == []
        return
    (*first,), (*second,) = given
    assert first[0] == second[0] == int(operands[3] is not None)
    assert first[1] == second[1]
    assert [*map(id, first[2:])] == [*map(id, second[2:])]
    assert len(first[2:]) == PASSED[name]


@pytest.mark.parametrize("launched", ["run_alone", "run_added"], indirect=True)
def test_a_call_that_is_not_recorded_is_launched_at_once(launched: Launched) -> None:
    launches, _, method = launched
    operands = (rows(), vector(), vector(), rows() if method.endswith("added") else None, None)
    made, expected = (calls.normalise(operands, OPTIONS, (N,)) for calls in (native.calls, PYTHON))
    if method == "run_alone":
        made, expected = (made,), (expected,)
    assert [*map(id, made)] == [*map(id, expected)]
    first, second = launches
    assert first == second


@pytest.mark.parametrize("launched", ["run_recorded_alone"], indirect=True)
def test_a_launch_that_fails_says_so(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such launch")

    found = find_recorded(PLAIN(), OPTIONS)[2]
    plan = launched[1]
    assert found is not None
    assert found[0] is plan
    monkeypatch.setattr(plan, "forward", lambda m: (fail, *plan._forward(m)[1:]))
    with pytest.raises(RuntimeError, match="no such launch"):
        native.calls.run_recorded_alone(found)


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
        return find_gradients(operands, options)

    monkeypatch.setattr(native, "calls", _Asking(PYTHON, gradients))
    differentiated(name)
    ((key, (kind,)),) = [item for item in dispatch.plans.items() if "recorded bwd" in _as_tuple(item[0])]
    ((operands, options),) = arrived
    plan = kind.plan
    made = plan._lay_out(M if len(operands[1].shape) == 2 else 2 * M)

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
    laid = dataclasses.replace(made, steps=steps, finish=finish, by_address=True, exchange=0)
    monkeypatch.setattr(plan, "layout", lambda m: laid)
    monkeypatch.setattr(plan, "empty", empty)
    calls = native.calls_among(dispatch, PYTHON)
    assert not isinstance(calls, native.InPython)
    found = []
    for each in (calls, PYTHON):
        asked.clear()
        found.append(each.gradients(operands, options))
    (no_key, ours), (said, expected) = found
    assert no_key is None
    assert said == key
    assert ours is not None
    assert expected is not None
    assert [*map(id, ours)] == [*map(id, expected)]
    half = len(launches) // 2
    assert half == len(steps) + (finish is not None)
    assert launches[:half] == launches[half:]


def _as_tuple(key: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = key
    return found


class _Asking(native.InPython):
    """Calls in Python, whose gradients are asked for otherwise."""

    def __init__(self, python: native.InPython, gradients: Callable[..., Any]) -> None:
        super().__init__(python.apply, python.apply_add)
        vars(self)["gradients"] = gradients


def test_gradients_of_another_call_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    differentiated("LayerNorm")
    asked: list[Any] = []
    (plan,) = [kind.plan for key, kinds in dispatch.plans.items() if "recorded bwd" in _as_tuple(key) for kind in kinds]
    interpreted = plan._lay_out(M)
    launched = dataclasses.replace(
        interpreted, steps=tuple((lambda *_: None, grid) for _, grid in interpreted.steps), finish=None, by_address=True
    )
    monkeypatch.setattr(plan, "layout", lambda m: launched)

    def gradients(*given: Any) -> Any:
        asked.append(given)
        return None, None

    calls = native.calls_among(dispatch, _Asking(PYTHON, gradients))
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
        assert calls.gradients(given, said) == (None, None)
        assert asked.pop() == (given, said)
    for around in SURROUNDINGS.values():
        with around():
            assert calls.gradients(operands, options) == (None, None)
        asked.pop()
    assert calls.gradients(operands, options)[1] is not None
    assert asked == []

    def fail(*_: Any) -> None:
        raise RuntimeError("no such launch")

    failing = dataclasses.replace(launched, steps=tuple((fail, grid) for _, grid in launched.steps))
    monkeypatch.setattr(plan, "layout", lambda m: failing)
    with pytest.raises(RuntimeError, match="no such launch"):
        calls.gradients(operands, options)
    assert asked == []
    # And what is launched with tensors, or with memory that programs exchange values through.
    for otherwise in (interpreted, dataclasses.replace(launched, exchange=1)):
        monkeypatch.setattr(plan, "layout", lambda m, layout=otherwise: layout)
        assert calls.gradients(operands, options) == (None, None)
        asked.pop()
    with pytest.raises(TypeError, match="gradients are looked up by what arrives, and by options"):
        calls.gradients((dy, x), options)  # type: ignore[arg-type]  # the test is of that


def test_without_a_compiler_calls_are_found_in_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*_: Any) -> None:
        raise FileNotFoundError("no compiler")

    monkeypatch.setattr(native_launcher, "load", load)
    with caplog.at_level(logging.INFO, logger="normforge"):
        monkeypatch.setattr(native, "calls", native.calls_among(dispatch, PYTHON))
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
        assert isinstance(native.calls_among(dispatch, PYTHON), native.InPython)
    assert not list(tmp_path.rglob("*.so"))


def test_nothing_that_was_found_is_kept() -> None:
    operands = PLAIN()
    made_known(operands, OPTIONS)
    held = [weakref.ref(each) for each in operands if each is not None]
    for _ in range(3):
        assert found_in_c(operands, OPTIONS, None) is not None
        assert found_in_c(operands, ("layer", -1.0, *OPTIONS[2:]), None) is None
    del operands
    gc.collect()
    assert [each() for each in held] == [None] * len(held)

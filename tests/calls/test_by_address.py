"""Launches by address, as on a GPU: calls of every family, in the interpreter, which looks up what addresses hold."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import normforge
from normforge.calls import native
from normforge.calls.native import Lookup
from normforge.calls.outputs import packing
from normforge.codegen.instance import Tile
from normforge.codegen.values import Pipeline
from normforge.families.public import rmsnorm2d_bwd
from normforge.kernels import assembly
from normforge.kernels.gpu import POINTERS
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch
from proving.cases import Case, cases, check, operands
from proving.cold_warm.contexts import CONTEXTS

from .. import calling
from ..calling import LENGTHS, each_norm
from ..stand_in_cuda import NEEDS_A_COMPILER
from ..thorough import THOROUGH

pytestmark = NEEDS_A_COMPILER

M, N = 3, 64
# The values of each launch by their slots.
Launched = list[dict[str, Any]]

# The first type of each word: bytes stand before what kernels take as bytes.
TYPES = {word.strip("*"): getattr(torch, name) for name, word in reversed(POINTERS.items())}


def at_address(word: Any, value: Any) -> Any:
    """Return an element in memory, if a slot is a pointer; the interpreter reads and writes from there on."""
    if not isinstance(word, str) or not word.startswith("*"):
        return None if word is None else value
    name, _, aligned = word.strip("*").partition(":")
    assert not aligned or value % 16 == 0
    if not value:
        return torch.empty(0, dtype=TYPES[name])
    memory = (ctypes.c_uint8 * 8).from_address(value)
    return torch.frombuffer(memory, dtype=torch.uint8).view(TYPES[name])[:1]


@pytest.fixture(params=["C", "Python"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nothing_known: None) -> Launched:
    """Launches of calls that are looked up in C, or in Python."""
    found: Launched = []
    make = Launcher.__init__

    def addressed(launcher: Launcher, kernel: Any, recipe: Any, *on: Any) -> None:
        make(launcher, kernel, recipe, *on)
        words = recipe.types

        def launch(grid: Any, values: tuple[Any, ...]) -> None:
            found.append({slot: value for (slot, word), value in zip(words.items(), values, strict=True) if word})
            # Programs that wait for one another cannot run one after another.
            if not found[-1].get("exchange_ptr"):
                launcher.launch_tensors(grid, tuple(map(at_address, words.values(), values)))

        launcher.launch = launch

    monkeypatch.setattr(Launcher, "__init__", addressed)
    native.start()
    look_ups = native.makes(build=True) if request.param == "C" else Lookup
    monkeypatch.setattr(native, "calls", native.calls_among(dispatch, look_ups, native._records))
    return found


PLAIN = cases("plain", vary=("norm",))
DIFFERENTIATED = [
    *cases("plain", "added", "renormed", "gated", "group", vary=("norm",)),
    # Of others what their samples share is added up by torch's operators.
    *cases("modulated", vary=("norm",), without=("gate", "residual", "weight", "bias")),
    *cases("plain", vary=("without",))[1:],
    *(case.but(shape=(3, LENGTHS["one_pass"]), dtype=torch.bfloat16) for case in PLAIN),
    *(pytest.param(case.but(shape=(3, LENGTHS["two_pass"])), marks=THOROUGH) for case in PLAIN),
]


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=str)
def test_a_call_and_its_gradients(case: Case, launched: Launched, looked: list[str]) -> None:
    for seed in range(2):
        looked.clear()
        check(case, operands(case, seed=seed))
    assert launched
    assert looked == []


DROPS: dict[str, Any] = {"dropout_p": 0.25, "dropout_rng": torch.tensor([0, 1, 2, 3])[2:]}
MODES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bare": ((), {}),
    "with statistics": (("weight",), {"save_mv": True}),
    "everything": (
        ("weight", "x_bias", "smooth_scale", "residual"),
        {"fadd": "pre_add_store", "fquant": "smooth_dynamic", "save_mv": True},
    ),
    "dropout": (("weight", "residual"), {"fadd": "pre_add_store", **DROPS, "save_mv": True}),
}


@pytest.mark.parametrize(("names", "modes"), MODES.values(), ids=MODES)
@each_norm
def test_a_forward_function(
    norm: str, names: tuple[str, ...], modes: dict[str, Any], launched: Launched, looked: list[str]
) -> None:
    """And into tensors of the caller's, of which autograd counts that they are written to."""
    for into in (False, True):
        for _ in range(2):
            looked.clear()
            given = {name: torch.randn((M, N) if name == "residual" else N) for name in names}
            outs = {"out": torch.empty(M, N, dtype=torch.int8 if "fquant" in modes else torch.float32)} if into else {}
            outs |= {"residual_out": torch.empty(M, N)} if into and "residual" in names else {}
            calling.check(norm, torch.randn(M, N), **given, **modes, **outs, eps=0.25)
            assert [each._version for each in outs.values()] == [1] * len(outs)
    assert len(launched) == 4
    assert looked == []


def test_gradients_of_another_call_are_not_found(launched: Launched) -> None:
    x, weight, dy = torch.randn(M, N, requires_grad=True), torch.randn(N, requires_grad=True), torch.randn(M, N)
    torch.autograd.grad(normforge.layer_norm(x, (N,), weight, weight), (x, weight), dy)
    options = ("layer", 0.0, "after_weight", None, torch.float32, ("dx", "dweight", "dbias"))
    operands = (dy, x, weight, torch.zeros(packing(M, mean=True)[0]), None, None)
    find = native.calls.gradients.gradients
    assert find(operands, options)[1] is not None
    # Of another dtype, of other rows, of none, elsewhere, and with other options.
    for given, said in (
        ((dy.double(), *operands[1:]), options),
        ((dy[:1], *operands[1:]), options),
        ((dy[:0], x[:0], *operands[2:]), options),
        ((torch.zeros(M * N + 1)[1:].view(M, N), *operands[1:]), options),
        (operands, (*options[:-1], ("dx",))),
    ):
        assert find(given, said)[1] is None
    for around in ("dispatch mode", "dual level", "inference"):
        with CONTEXTS[around]():
            assert find(operands, options)[1] is None


def test_gradients_are_asked_for_by_a_list(launched: Launched, looked: list[str]) -> None:
    """As operators do; the scale of dy stands behind the list."""
    given: dict[str, Any] = {"dy": torch.randn(M, N).to(torch.float8_e4m3fn), "x": torch.randn(M, N)}
    given |= {"dy_scale": torch.rand(M), "rstd": torch.ones(M)}
    found: list[Any] = [rmsnorm2d_bwd(**given, wants=names(["dx"])).dx for names in (list, tuple, list)]
    assert looked == ["call", "kernel"]
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("backward", [False, True])
def test_programs_that_wait_for_one_another_have_memory_to_do_it_by(
    backward: bool, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 2048 if backward else 70000
    monkeypatch.setattr(
        assembly, "choose", lambda *_: Tile(Pipeline.SPREAD, 1 + backward, 1024, 4, held=2 - 2 * backward)
    )
    given: dict[str, Any] = {name: torch.randn(M, n).bfloat16() for name in ("x", "dy" if backward else "residual")}
    given |= {"rstd": torch.ones(M)} if backward else {"weight": torch.randn(n)}
    for _ in ("first", "known"):
        made = rmsnorm2d_bwd(**given) if backward else normforge.rmsnorm2d_fwd(**given, fadd="pre_add_store")
        there = {name: each for name, each in (given | made._asdict()).items() if each is not None}
        addresses = {f"{name}_ptr": each.data_ptr() for name, each in there.items()}
        values = launched.pop()
        assert addresses.items() <= values.items()
        assert values["exchange_ptr"] not in {0, *addresses.values()}
    assert not launched


def test_a_launch_that_fails_says_so(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(M, N, requires_grad=True)
    y = normforge.layer_norm(x, (N,))
    torch.autograd.backward(normforge.layer_norm(x, (N,)).sum())
    monkeypatch.setattr(Launcher, "launch_tensors", Mock(side_effect=RuntimeError("no such launch")))
    for call in (lambda: normforge.layer_norm(x, (N,)), lambda: torch.autograd.grad(y.sum(), x)):
        with pytest.raises(RuntimeError, match="no such launch"):
            call()

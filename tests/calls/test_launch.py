"""What launches by address are given: each operand, result, number and piece of memory in its own slot."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import normforge
from normforge.calls import plan
from normforge.codegen.instance import Tile
from normforge.codegen.values import Pipeline
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.kernels import assembly
from normforge.kernels.assembly import Recipe
from normforge.kernels.launcher import Launcher
from normforge.selection import dispatch

from .shared import there

M = 3
LENGTHS = {"rows": 64, "one_pass": 1500, "two_pass": 33000}
each_length = pytest.mark.parametrize("n", LENGTHS.values(), ids=LENGTHS)

# The kernel's name, and the values of a launch by their slots.
Launched = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What is launched, by address; nothing runs."""
    found: Launched = []

    class Addressed(Launcher):
        def __init__(self, kernel: Any, recipe: Recipe, *given: Any) -> None:
            super().__init__(kernel, recipe, *given)
            types = recipe.types
            self.launch = lambda grid, values: found.append(
                (
                    self.key.symbol,
                    {slot: value for (slot, of), value in zip(types.items(), values, strict=True) if of is not None},
                )
            )

    monkeypatch.setattr(plan, "Launcher", Addressed)
    monkeypatch.setattr(dispatch, "plans", {})
    return found


def addresses(tensors: dict[str, torch.Tensor | None]) -> dict[str, int]:
    return {f"{name}_ptr": tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}


def forward_operands(n: int, *names: str) -> dict[str, Any]:
    shapes = {"x": (M, n), "residual": (M, n)}
    return {name: torch.randn(shapes.get(name, (n,)), dtype=torch.bfloat16) for name in names}


FORWARD: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bare": (("x",), {}),
    "plain": (("x", "weight", "bias"), {}),
    "with statistics": (("x", "weight"), {"save_mv": True}),
    "everything": (
        ("x", "weight", "bias", "residual", "smooth_scale", "x_bias"),
        {"fadd": "pre_add_store", "fquant": "smooth_dynamic", "save_mv": True},
    ),
}


@each_length
@pytest.mark.parametrize(("names", "modes"), FORWARD.values(), ids=FORWARD)
def test_forward(n: int, names: tuple[str, ...], modes: dict[str, Any], launched: Launched) -> None:
    operands = forward_operands(n, *names)
    for _ in ("first", "known"):
        launched.clear()
        outputs = normforge.layernorm2d_fwd(**operands, **modes, eps=0.25)
        ((_, values),) = launched
        numbers = {"M": M, "eps": 0.25, "weight_offset": 0.0}
        assert values == addresses(operands) | addresses(outputs._asdict()) | numbers


@pytest.mark.parametrize("fadd", ["none", "pre_add_store"])
def test_programs_that_wait_for_one_another_have_memory_to_do_it_by(
    fadd: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "choose", lambda *_: Tile(Pipeline.SPREAD, 1, 1024, 4, held=2))
    operands = forward_operands(70000, "x", "weight", *(() if fadd == "none" else ("residual",)))
    for _ in ("first", "known"):
        launched.clear()
        made = normforge.rmsnorm2d_fwd(**operands, fadd=fadd, weight_offset=1.0)
        ((_, values),) = launched
        own = addresses(operands | {"y": made.y} | ({} if fadd == "none" else {"residual_out": made.residual_out}))
        assert values == own | {"exchange_ptr": values["exchange_ptr"], "M": M, "eps": 1e-6, "weight_offset": 1.0}
        assert values["exchange_ptr"] not in {0, *own.values()}


@each_length
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("fused", [False, True], ids=["alone", "add"])
def test_recorded(n: int, norm: str, fused: bool, launched: Launched) -> None:
    operands = forward_operands(n, *("x", "weight"), *(("bias",) if norm == "layer" else ()))
    x, *vectors = (tensor.requires_grad_() for tensor in operands.values())
    residual = torch.randn(M, n).bfloat16() if fused else None
    functions: dict[str, Callable[..., Any]] = {
        "layer": normforge.add_layer_norm if fused else normforge.layer_norm,
        "rms": normforge.add_rms_norm if fused else normforge.rms_norm,
    }
    function = functions[norm]
    given = (x, residual, *vectors) if fused else (x, (n,), *vectors)
    for _ in ("first", "known"):
        launched.clear()
        made = function(*given, eps=0.25)
        y, total = made if fused else (made, None)
        ((_, values),) = launched
        statistics = {slot: values.pop(slot) for slot in ("mean_ptr", "rstd_ptr") if slot in values}
        tensors = operands | {"y": y, "residual_out": total, "residual": residual}
        assert values == addresses(tensors) | {"M": M, "eps": 0.25, "weight_offset": 0.0}
        kept = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None][-1]
        # Each at a multiple of 16 bytes, in the one tensor that is kept.
        expected = [kept.data_ptr(), kept.data_ptr() + 16] if norm == "layer" else [kept.data_ptr()]
        assert list(statistics.values()) == expected

        launched.clear()
        torch.autograd.grad(y, (x, *vectors), torch.randn(M, n).bfloat16())
        assert {slot: launched[0][1][slot] for slot in statistics} == statistics


WANTS = {"dx": ("dx",), "dweight": ("dweight",), "all": ("dx", "dweight", "dbias", "dx_bias")}


@each_length
@pytest.mark.parametrize("wants", WANTS.values(), ids=WANTS)
def test_backward(n: int, wants: tuple[str, ...], launched: Launched) -> None:
    names = ("dy", "x", "weight", "mean", "rstd", "x_bias", "dresidual_out")
    shapes = {"weight": (n,), "x_bias": (n,), "mean": (M,), "rstd": (M,)}
    given: dict[str, Any] = {name: torch.randn(shapes.get(name, (M, n))) for name in names}
    for _ in ("first", "known"):
        launched.clear()
        gradients = layernorm2d_bwd(**given, wants=wants)._asdict()
        sums = [name for name in wants if name != "dx"]
        steps, finish = (launched[:-1], launched[-1:]) if sums else (launched, [])
        assert len(steps) == (2 if n == LENGTHS["two_pass"] else 1)
        shared = steps[0][1]
        # All steps are given the same, and each kernel takes what it names.
        assert all(values == shared for _, values in steps)
        pieces = {slot: shared.pop(slot) for slot in tuple(shared) if slot.endswith("_mean_ptr") or slot[:-4] in sums}
        dx = {"dx": gradients["dx"]}
        assert shared == addresses(given | dx) | {"M": M, "weight_offset": 0.0}
        starts = sorted(pieces.values())
        assert len(set(starts)) == len(pieces) == len(sums) + 2 * (len(steps) - 1)
        assert all(start % 16 == 0 for start in starts)
        # A row of partial sums for each program, or a value a row.
        assert all(later - sooner >= 4 * M for sooner, later in pairwise(starts))
        assert len(finish) == bool(sums)
        for symbol, values in finish:
            assert symbol == "sum_partials"
            assert values.pop("programs") >= 1
            partials = {slot: values.pop(slot) for slot in tuple(values) if slot.endswith("_partials_ptr")}
            assert partials == {f"{name}_partials_ptr": pieces[f"{name}_ptr"] for name in sums}
            assert values == addresses({name: gradients[name] for name in sums})


def test_backward_programs_that_wait_for_one_another(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "choose", lambda *_: Tile(Pipeline.SPREAD, 2, 1024, 4))
    given = forward_operands(2048, "x") | {"dy": torch.randn(M, 2048).bfloat16(), "rstd": torch.ones(M)}
    for _ in ("first", "known"):
        launched.clear()
        dx = rmsnorm2d_bwd(**given).dx
        ((_, values),) = launched
        own = addresses(given | {"dx": dx})
        assert values == own | {"exchange_ptr": values["exchange_ptr"], "M": M, "weight_offset": 0.0}
        assert values["exchange_ptr"] not in {0, *own.values()}


@each_length
def test_dropout(n: int, launched: Launched) -> None:
    """What it is given is behind all else, forward and backward; calls without have none of it."""
    operands = forward_operands(n, "x", "weight", "bias", "residual", "x_bias")
    drops: dict[str, Any] = {"dropout_p": 0.25, "dropout_rng": torch.tensor([1, 2, 3])[1:]}
    random = {"dropout_rng_ptr": drops["dropout_rng"].data_ptr(), "dropout_p": 0.25}
    for _ in ("first", "known"):
        launched.clear()
        outputs = normforge.layernorm2d_fwd(**operands, **drops, eps=0.5, fadd="pre_add_store", save_mv=True)
        ((_, values),) = launched
        numbers = {"M": M, "eps": 0.5, "weight_offset": 0.0}
        assert values == addresses(operands) | addresses(outputs._asdict()) | numbers | random
    given = {"dy": operands["residual"], "x": operands["x"], "weight": operands["weight"], "mean": there(outputs.mean)}
    given |= {"rstd": outputs.rstd, "dresidual_out": operands["residual"]}
    for wants in (("ddropped",), ("dx", "ddropped"), ("dx",), ("dweight", "ddropped")):
        for _ in ("first", "known"):
            launched.clear()
            found = layernorm2d_bwd(**given, **drops, wants=wants)
            assert tuple(name for name, gradient in found._asdict().items() if gradient is not None) == wants
            for symbol, values in launched:
                if symbol != "sum_partials":
                    inner = {slot: values.pop(slot) for slot in ("gh_mean_ptr", "g_mean_ptr") if slot in values}
                    assert len(inner) == 2 * (n == LENGTHS["two_pass"])
                    values.pop("dweight_ptr", None)
                    rows = addresses({"dx": found.dx, "ddropped": found.ddropped})
                    assert values == addresses(given) | rows | {"M": M, "weight_offset": 0.0} | random

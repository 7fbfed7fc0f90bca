"""The parts of calls: what is done again of a call, how figures come about, and the command from end to end."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normforge
from benchmarks import cli, parts
from benchmarks.beside import load_beside
from benchmarks.call_parts import (
    BACKWARD,
    BESIDE,
    QUANTISED,
    QUANTISED_IN_PLACE,
    RECORDED,
    RECORDED_IN_PLACE,
    WHOLE,
    WHOLE_OF,
    Part,
)
from benchmarks.errors import UsageError
from benchmarks.in_place import ALLOCATIONS, APPLY, PYTHON, SAVING, quantised_in_place, recorded_in_place
from benchmarks.parts import NOTHING, SUM, THE_WHOLE, measure, summarised
from benchmarks.take_apart import nothing, take_apart, without
from normforge.calls.known import all_plans
from normforge.calls.plan import Plan, Sized
from normforge.families import plain_calls, public
from normforge.selection import dispatch

from ..thorough import THOROUGH

M, N = 2, 64


def _tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator) for size in ((M, N), (N,), (N,), (M, N)))


def _read(folder: Path) -> tuple[list[str], list[dict[str, str]]]:
    lines = (folder / "parts.csv").read_text().splitlines()
    header = [line for line in lines if line.startswith("# ")]
    return header, list(csv.DictReader(lines[len(header) :]))


@THOROUGH
def test_the_command_measures_all_but_launches_in_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["parts", "--seconds", "0", "--revision", "a test", "--out", str(tmp_path)]) == 0
    header, records = _read(tmp_path)
    assert header[0] == "# device: Triton's CPU interpreter"
    assert {"# revision: a test", f"# shape: {M}×{N}"} <= set(header)
    groups = [WHOLE, QUANTISED, QUANTISED_IN_PLACE, RECORDED, RECORDED_IN_PLACE, BACKWARD]
    assert list(dict.fromkeys(record["group"] for record in records)) == groups
    assert {record["passes"] for record in records} == {"2"}
    assert not [record for record in records if "launch" in record["part"]]
    figures = {(record["group"], record["part"]): record["us"] for record in records}
    assert len(figures) == len(records)
    for group, whole in WHOLE_OF.items():
        names = [record["part"] for record in records if record["group"] == group]
        assert names[-2:] == [SUM, THE_WHOLE]
        assert figures[group, THE_WHOLE] == figures[WHOLE, whole]
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(records)
    assert [cell.strip() for cell in shown[2].split("|")[1:3]] == [WHOLE, "F.layer_norm"]


@pytest.mark.gpu
def test_a_card_launches_and_the_parts_add_up(tmp_path: Path) -> None:
    assert cli.main(["parts", "--seconds", "2", "--out", str(tmp_path)]) == 0
    _, records = _read(tmp_path)
    figures = {(record["group"], record["part"]): float(record["us"]) for record in records}
    for group, launches in ((QUANTISED, "launch"), (RECORDED, "launch"), (BACKWARD, "2 launches")):
        assert figures[group, launches] > 1
        # Parts are done again with everything in the CPU's caches, so their sum is less, though not by much.
        assert 0.4 < figures[group, SUM] / figures[group, THE_WHOLE] < 1.2
    for group in (QUANTISED_IN_PLACE, RECORDED_IN_PLACE):
        assert figures[group, "launch"] > 1
        # What is left besides is that the whole call is timed twice.
        assert figures[group, SUM] == pytest.approx(figures[group, THE_WHOLE], rel=0.1)


@THOROUGH
def test_another_revision_is_timed_beside_this_one(tmp_path: Path) -> None:
    tree = Path(__file__).resolve().parents[2]
    given = ["--seconds", "0", "--beside", str(tree), "--beside-revision", "another", "--out", str(tmp_path)]
    assert cli.main(["parts", *given]) == 0
    header, records = _read(tmp_path)
    assert "# beside: another" in header
    ours, theirs = (
        {record["part"] for record in records if record["group"] == group and not record["part"].startswith("F.")}
        for group in (WHOLE, BESIDE)
    )
    assert theirs == ours
    families = {"layer_norm", "add_layer_norm, dropout", "modulated_layer_norm", "gated_rms_norm", "group_norm"}
    assert theirs >= {"layernorm2d_fwd", "quantised_rms_norm", *(f"{name}, backward alone" for name in families)}


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no runtime/__init__\.py; pass the root of a checkout"):
        load_beside(tmp_path, tmp_path / "scratch")


def test_every_part_has_its_round_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def one_round(call: Callable[[], Any], calls: int) -> float:
        assert calls == 50
        order.append("nothing" if call is nothing else call())
        return float(len(order))

    monkeypatch.setattr(parts, "_round", one_round)
    a, b = Part(WHOLE, "a", lambda: "a"), Part(WHOLE, "b", lambda: "b")
    times = measure((a, b), 50, 0.0, 2)
    assert order == ["a", "b", "nothing"] * 4
    # Two passes count for nothing.
    assert times == {a: [7, 10], b: [8, 11], NOTHING: [9, 12]}


def test_parts_are_what_they_add_and_sum_up_to_a_row() -> None:
    whole = Part(WHOLE, WHOLE_OF[RECORDED], nothing)
    one, two = Part(RECORDED, "one", nothing), Part(RECORDED, "two", nothing, less="one")
    times = {whole: [20.0, 30.0, 41.0], one: [2.0, 3.0, 9.0], two: [8.0, 3.5, 3.0], NOTHING: [0.5, 8.0, 0.5]}
    rows = summarised(times)
    assert [(row.group, row.part, row.us, row.us_min, row.passes) for row in rows] == [
        (WHOLE, WHOLE_OF[RECORDED], 29.5, 19.5, 3),
        # A call of nothing takes 0.5 of it.
        (RECORDED, "one", 2.5, 1.5, 3),
        # The median and the least of both, not of what lies between them in one pass.
        (RECORDED, "two", 0.5, 1.0, 3),
        (RECORDED, SUM, 3.0, 2.5, 3),
        (RECORDED, THE_WHOLE, 29.5, 19.5, 3),
    ]


def test_what_a_call_allocates_is_allocated_again() -> None:
    x, weight, bias, residual = _tensors()
    taken = take_apart(
        lambda: normforge.layernorm2d_fwd(
            x, weight, bias, residual=residual, fadd="pre_add_store", fquant="dynamic", out_dtype=torch.int8
        ),
        M,
        interpreted=True,
    )
    outputs = [((M, N), torch.int8), ((M, N), torch.float32), ((M,), torch.float32)]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in taken.kept] == outputs
    addresses = taken.allocate()()
    assert len(set(addresses)) == 3
    assert not set(addresses) & {tensor.data_ptr() for tensor in taken.kept}
    assert taken.launches == []
    # What stood in for the plan does so no longer.
    assert all_plans() == [taken.plan]
    assert isinstance(taken.plan, Plan)


def test_what_a_call_launches_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, tuple[Any, ...]]] = []
    find = Plan._at

    def at(plan: Plan, shape: torch.Size) -> Sized:
        sized = find(plan, shape)
        steps = tuple((lambda grid, values: launched.append((grid, values)), grid) for _, grid in sized.layout.steps)
        return sized._replace(layout=sized.layout._replace(steps=steps, in_c=True))

    monkeypatch.setattr(Plan, "_at", at)
    x, weight, bias, residual = _tensors()
    taken = take_apart(
        lambda: normforge.layernorm2d_fwd(x, weight, bias, residual=residual, fadd="pre_add_store"),
        M,
        interpreted=False,
    )
    launched.clear()
    taken.launch()()
    ((grid, values),) = launched
    assert (grid, values) == taken.launches[0][1:]
    tensors = (x, weight, bias, residual, *taken.kept)
    assert {tensor.data_ptr() for tensor in tensors} <= set(values)


def test_the_backward_launches_write_the_same_gradients_again() -> None:
    x, weight, bias, dy = _tensors()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = normforge.layer_norm(x, (N,), weight, bias)
    taken = take_apart(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), M, interpreted=False)
    assert len(taken.launches) == 2
    for tensor in taken.kept:
        tensor.zero_()
    taken.launch()()
    expected = torch.autograd.grad(torch.nn.functional.layer_norm(x, (N,), weight, bias), leaves, dy)
    for found, gradient in zip(taken.kept, expected, strict=False):
        torch.testing.assert_close(found, gradient)


def test_a_call_in_place_lacks_what_it_is_to_lack() -> None:
    x, weight, bias, residual = _tensors()
    given: dict[str, Any] = {"residual": residual, "fadd": "pre_add_store"}
    taken = take_apart(lambda: normforge.layernorm2d_fwd(x, weight, bias, **given), M, interpreted=True)
    known = len(dispatch.plans)
    calls = quantised_in_place(taken, lambda function: lambda: function(x, weight, bias, **given))
    assert list(calls) == [PYTHON, ALLOCATIONS]
    # The very tensors of the first call, and then others, which nothing writes to.
    assert [output is kept for output, kept in zip(calls[PYTHON]()[:2], taken.kept, strict=True)] == [True, True]
    poisoned = [output.fill_(77) for output in calls[ALLOCATIONS]()[:2]]
    assert not {output.data_ptr() for output in poisoned} & {kept.data_ptr() for kept in taken.kept}
    assert len(dispatch.plans) == known


def test_a_recorded_call_in_place_lacks_what_it_is_to_lack() -> None:
    x, weight, bias, _ = _tensors()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    taken = take_apart(lambda: normforge.layer_norm(leaves[0], (N,), leaves[1], leaves[2]), M, interpreted=True)
    calls = recorded_in_place(taken, lambda function: lambda: function(leaves[0], (N,), leaves[1], leaves[2]))
    outputs = {name: call() for name, call in calls.items()}
    assert list(outputs) == [PYTHON, APPLY, SAVING, ALLOCATIONS]
    # All but the last are the first call's memory; what is recorded keeps tensors only where it is to.
    assert [y.data_ptr() == taken.kept[0].data_ptr() for y in outputs.values()] == [True, True, True, False]
    fresh = {name: calls[name]().grad_fn for name in (APPLY, SAVING, ALLOCATIONS)}
    saved = [kept.saved_tensors for kept in fresh.values() if kept is not None]
    assert [sum(tensor is not None for tensor in kept) for kept in saved] == [0, 3, 3]


@pytest.mark.parametrize("calls", [0, 2])
def test_what_leaves_no_plan_of_its_own_is_refused(calls: int) -> None:
    x, weight, bias, _ = _tensors()

    def call() -> None:
        for given in ((x, weight, bias), (x, weight))[:calls]:
            normforge.layernorm2d_fwd(*given)

    with pytest.raises(
        UsageError, match=rf"one call left {calls} plans in normforge.selection.dispatch, .* has to follow"
    ):
        take_apart(call, M, interpreted=True)


def test_a_call_without_bound_launches_is_refused() -> None:
    x, weight, bias, _ = _tensors()
    with pytest.raises(UsageError, match=r"made 1 allocations and 0 launches by its plan, .* why there is no launch"):
        take_apart(lambda: normforge.layernorm2d_fwd(x, weight, bias), M, interpreted=False)


def test_a_function_finds_what_is_named_instead() -> None:
    x, _, _, residual = _tensors()
    given: list[tuple[Any, ...]] = []

    def normalise(*passed: Any) -> torch.Tensor:
        given.append(passed)
        return x

    calls = SimpleNamespace(recorded=SimpleNamespace(normalise=normalise))
    alone = without(plain_calls.normalise, native=SimpleNamespace(calls=calls))
    operands = (x, None, None, residual, None)
    assert alone(operands, (N,), ("layer", 1e-5, 0.0, None, "after_weight")) is x
    assert given[0][0] is operands
    with pytest.raises(UsageError, match=r"normforge.families.public has no forward_gone, .* layernorm2d_fwd"):
        without(public.layernorm2d_fwd, forward_gone=nothing)


@pytest.mark.parametrize("given", ["soon", "-1", "inf"])
def test_seconds_are_a_time(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["parts", "--seconds", given])
    assert f"{given!r} is no time; give seconds, such as 20" in capsys.readouterr().err

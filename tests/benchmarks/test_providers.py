"""What providers compute on the CPU, and what the check makes of wrong outputs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cells import Cell, Norm, Task, cell_of
from benchmarks.inputs import make_inputs
from benchmarks.oracle import TOLERANCES, WrongOutputError, check, expect
from benchmarks.provider import Prepared, Provider, named
from benchmarks.providers import every_provider, find_providers
from benchmarks.runner import prepare

CPU = torch.device("cpu")
FLOAT = [
    Cell(task, norm, 5, 96)
    for norm in Norm
    for task in (Task.FORWARD, Task.ADD, Task.DROP_ADD, Task.BACKWARD, Task.MODULE, Task.GRAD_FORWARD, Task.GRAD_BOTH)
]
QUANTISED = [
    Cell(task, Norm.LAYER, 5, 96, "fp16", out, smooth)
    for task, out, smooth in (
        (Task.QUANT, "int8", False),
        (Task.QUANT, "int8", True),
        (Task.ADD_QUANT, "int8", True),
        (Task.ADD_QUANT, "fp8", False),
        (Task.ADD_QUANT, "fp8", True),
    )
]


GROUPED: list[Cell] = [
    cell_of(task, (2, 64, 3, 4), channels_last=last, silu=silu)
    for task, last, silu in (
        (Task.GROUP, False, False),
        (Task.GROUP, True, True),
        (Task.GROUP_BACKWARD, False, True),
        (Task.GROUP_BACKWARD, True, False),
    )
]


@pytest.mark.parametrize("cell", FLOAT + QUANTISED + GROUPED, ids=lambda cell: cell.id)
@pytest.mark.parametrize("name", ["eager", "normforge"])
def test_outputs_agree_with_the_oracle(name: str, cell: Cell) -> None:
    inputs = make_inputs(cell, CPU)
    (call,) = prepare(every_provider()[name], [inputs], expect(inputs))
    call()


@pytest.mark.parametrize("name", ["dx", "dweight", "dbias"])
def test_a_wrong_gradient_is_found(name: str) -> None:
    inputs = make_inputs(Cell(Task.BACKWARD, Norm.LAYER, 5, 96), CPU)
    expected = expect(inputs)
    outputs = {key: value.to(torch.bfloat16) for key, value in expected.items()}
    check(outputs, expected, inputs)
    outputs[name][..., 7] *= -1
    with pytest.raises(WrongOutputError, match=f"{name} is wrong"):
        check(outputs, expected, inputs)


def test_missing_nan_and_misshapen_outputs_are_found() -> None:
    inputs = make_inputs(Cell(Task.FORWARD, Norm.LAYER, 5, 96), CPU)
    expected = expect(inputs)
    y = expected["y"].to(torch.bfloat16)
    with pytest.raises(WrongOutputError, match="y is missing"):
        check({"z": y}, expected, inputs)
    with pytest.raises(WrongOutputError, match=r"not \(5, 96\) torch\.bfloat16"):
        check({"y": y.float()}, expected, inputs)
    y[2, 3] = float("nan")
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": y}, expected, inputs)


def test_a_quantised_value_two_steps_off_is_found() -> None:
    inputs = make_inputs(QUANTISED[0], CPU)
    expected = expect(inputs)
    scale = expected["y"].abs().amax(-1) / 127
    y = (expected["y"] / scale.unsqueeze(-1)).round().to(torch.int8)
    check({"y": y, "y_scale": scale}, expected, inputs)
    y[1, 1] += 2 if y[1, 1] < 0 else -2
    with pytest.raises(WrongOutputError, match="y is wrong"):
        check({"y": y, "y_scale": scale}, expected, inputs)


@pytest.mark.parametrize(("times", "fails"), [(1.5, False), (2.5, True)])
def test_an_expression_may_be_off_by_what_it_allows_itself(times: float, fails: bool) -> None:
    inputs = make_inputs(Cell(Task.FORWARD, Norm.LAYER, 5, 96), CPU)
    exact = expect(inputs)["y"]
    tolerance = TOLERANCES[inputs.x.dtype] * (exact.abs() + exact.square().mean().sqrt())
    y = (exact + times * tolerance).to(inputs.x.dtype)
    one = Provider("one", "one", (), {(Task.FORWARD, Norm.LAYER): lambda _: Prepared(lambda: y, named("y"), 2.0)})
    if not fails:
        prepare(one, [inputs], {"y": exact})
        return
    with pytest.raises(WrongOutputError, match=r"y is wrong by 1\.[23]\d? times its tolerance"):
        prepare(one, [inputs], {"y": exact})


def test_a_dropout_is_held_to_the_mask_that_it_drew() -> None:
    inputs = make_inputs(Cell(Task.DROP_ADD, Norm.LAYER, 64, 96), CPU)
    assert inputs.residual is not None

    def outputs(p: float, factor: float) -> dict[str, torch.Tensor]:
        assert inputs.residual is not None
        total = torch.nn.functional.dropout(inputs.x, p) * factor + inputs.residual
        y = torch.nn.functional.layer_norm(total, (96,), inputs.weight, inputs.bias, inputs.eps)
        return {"y": y, "residual_out": total}

    expected = expect(inputs)
    check(outputs(0.1, 1.0), expected, inputs)
    with pytest.raises(WrongOutputError, match=r"a share of 0\.\d+ is dropped, not 0\.1"):
        check(outputs(0.3, 0.7 / 0.9), expected, inputs)
    with pytest.raises(WrongOutputError, match=r"^(y|residual_out) is wrong"):
        check(outputs(0.1, 0.9), expected, inputs)
    with pytest.raises(WrongOutputError, match="residual_out is missing"):
        check({}, expected, inputs)


def test_a_peer_may_be_allowed_more_of_some_outputs() -> None:
    inputs = make_inputs(Cell(Task.BACKWARD, Norm.LAYER, 5, 96, "fp16"), CPU)
    expected = expect(inputs)
    outputs = {name: value.to(torch.float16) for name, value in expected.items()}
    outputs["dweight"] += 0.01 * expected["dweight"].square().mean().sqrt()
    with pytest.raises(WrongOutputError, match="dweight is wrong"):
        check(outputs, expected, inputs)
    check(outputs, expected, inputs, {"dweight": 8.0})
    with pytest.raises(WrongOutputError, match="dweight is wrong"):
        check(outputs, expected, inputs, {"dbias": 8.0})


def test_peers_are_found_by_import_and_named_when_absent() -> None:
    present, absent = find_providers([])
    assert {"eager", "copy", "normforge"} <= present.keys()
    assert list(present)[-2:] == ["normforge", "copy"]
    assert present.keys().isdisjoint(absent)
    assert present.keys() | absent.keys() == every_provider().keys()
    assert all(absent.values())


def test_providers_are_chosen_by_pattern() -> None:
    assert list(find_providers(["c*y", "eager"])[0]) == ["eager", "copy"]
    with pytest.raises(ValueError, match=r"--providers nobody names no provider; there are .*eager"):
        find_providers(["nobody"])

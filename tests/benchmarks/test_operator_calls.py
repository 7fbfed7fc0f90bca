"""What operators take of the host: what is timed launches nothing in the interpreter, and figures are a norm's own."""

from __future__ import annotations

import pytest
import torch

import normforge
from benchmarks import cli
from benchmarks.call_parts import Part
from benchmarks.operator_calls import COMPILED, EAGER, table
from benchmarks.parts import NOTHING
from benchmarks.take_apart import launching_nothing

from ..thorough import THOROUGH


def test_figures_are_less_what_is_timed_besides_and_of_one_norm() -> None:
    eager, one = Part(EAGER, "rmsnorm2d_fwd", list), Part(COMPILED, "M varies, one", list)
    many = Part(COMPILED, "M varies", list, less=one.name)
    shown = table(
        {eager: [5.0, 5.5, 6.0], one: [50.0, 51.0, 52.0], many: [370.0, 371.0, 372.0], NOTHING: [1.0, 1.5, 2.0]}
    )
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in shown.splitlines()[2:]]
    assert cells == [
        ["rmsnorm2d_fwd", "4.0", "1.00", "4.0", "1.00"],
        ["M varies", "10.0", "2.50", "10.0", "2.50"],
    ]


def test_known_calls_launch_nothing_meanwhile() -> None:
    x, other = torch.randn(2, 3, 64)
    normforge.rmsnorm2d_fwd(x)
    # Known too, and of another plan.
    normforge.group_norm(x, 4)
    with launching_nothing():
        # Of rows that nobody normalised before, whose y no memory holds.
        meanwhile = normforge.rmsnorm2d_fwd(other).y
    assert meanwhile.shape == other.shape
    assert not torch.equal(meanwhile, normforge.rmsnorm2d_fwd(other).y)


@THOROUGH
def test_the_command_times_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    assert cli.main(["operators", "--seconds", "0", "--revision", "a test"]) == 0
    shown = capsys.readouterr().out
    assert "revision: a test\n" in shown
    assert "launches: none" in shown
    names = [line.split("|")[2].strip() for line in shown.splitlines() if line.startswith("| a")]
    assert names == [
        "F.rms_norm",
        "rms_norm",
        "rmsnorm2d_fwd",
        "rmsnorm2d_fwd, residual added",
        "operator",
        "operator, residual added",
        "M fixed",
        "M varies",
    ]

"""The tutorial as a peer: found where the user has it, without what it does by itself when it is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.cells import Cell, Norm, Task
from benchmarks.providers import find_providers

from .small import holds_to_the_oracle

PEER = "tutorial05"
VARIABLE = "NORMFORGE_TUTORIAL05"

# Of the tutorial's form: a kernel, a function of its signature, and calls that stand for themselves.
STAND_IN = '''"""A stand-in."""
import torch
import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=cols < N), mask=cols < N)


def layer_norm(x, normalized_shape, weight, bias, eps):
    doubled = torch.empty_like(x)
    _double[(x.shape[0],)](x.detach(), doubled, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    assert torch.equal(doubled, 2 * x)
    return torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)


def bench():
    raise AssertionError("importing the tutorial runs its benchmark")


bench()
print("said", bench())
'''


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "05-layer-norm.py"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.delitem(sys.modules, "benchmarks.tutorial05", raising=False)
    return path


@pytest.mark.parametrize(
    "task", [Task.FORWARD, Task.GRAD_FORWARD, Task.BACKWARD, Task.GRAD_BOTH], ids=lambda t: t.value
)
def test_its_function_is_called_and_nothing_else_is(tutorial: Path, task: Task) -> None:
    tutorial.write_text(STAND_IN)
    holds_to_the_oracle(PEER, Cell(task, Norm.LAYER, 3, 48, "fp16"))


def test_where_it_is_looked_for_is_said(tutorial: Path) -> None:
    absent = find_providers([PEER])[1]
    assert absent[PEER].startswith(
        f"there is no {tutorial}; set {VARIABLE} to the file python/tutorials/05-layer-norm.py"
    )


def test_a_file_of_something_else_is_refused(tutorial: Path) -> None:
    tutorial.write_text("import torch\n")
    assert find_providers([PEER])[1] == {PEER: f"{tutorial} defines no layer_norm, as Triton's tutorial 05 does"}

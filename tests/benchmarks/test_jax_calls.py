"""Calls from JAX beside those from torch: what is timed computes the same, and how the times are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import cli, jax_calls
from benchmarks.errors import UsageError
from benchmarks.jax_calls import measured, table, ways
from benchmarks.jax_results import CASES, Case, Row
from benchmarks.profile import MARK

from ..jax import settled

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    settled.settle(on_gpu=False)


def traced(*us: float) -> dict[str, Any]:
    """What the profiler says of calls that each launch two kernels, one as long as the other."""
    events: list[dict[str, Any]] = []
    for at, duration in enumerate(us):
        start = 1000.0 * at
        events.append({"ph": "X", "cat": "user_annotation", "name": MARK, "ts": start, "dur": 900.0})
        for half in range(2):
            about = {"ph": "X", "ts": start + 10 * half, "args": {"correlation": 2 * at + half, "grid": [1, 1, 1]}}
            events.append({**about, "cat": "cuda_driver", "name": "cuLaunchKernel", "dur": 1.0})
            events.append({**about, "cat": "kernel", "name": f"k{half}", "dur": duration / 2})
    return {"traceEvents": events}


def test_a_call_takes_what_its_kernels_take() -> None:
    case = CASES[0]
    made = measured(case, {"jax": lambda: None}, lambda call, before: traced(30.0, 10.0, 20.0))
    assert made == [Row(str(case), "jax", 20.0, 14.0, 26.0, 3, "k0 k1")]


def test_the_table_compares_calls_from_jax_with_both() -> None:
    rows = [Row("case", way, us, us, us, 1, "") for way, us in (("torch", 20.0), ("jax", 21.0), ("xla", 42.0))]
    assert table(rows).splitlines()[-1].replace(" ", "") == "|case|21.0|20.0|42.0|1.050|2.00|"


@pytest.mark.parametrize("trains", [False, True])
def test_every_way_computes_the_same(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(4, 64, "fp32", trains)
    for call in ways(case, CPU).values():
        call()
    monkeypatch.setattr(jax_calls, "_formula", lambda jnp, x, weight, bias: x * weight + bias)
    with pytest.raises(UsageError, match=r"LayerNorm 4x64 fp32.* by xla is .* off what torch's call computes"):
        ways(case, CPU)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["jax"]) == cli.USAGE
    assert "jax shows what ran on a GPU, and torch finds none here" in capsys.readouterr().err

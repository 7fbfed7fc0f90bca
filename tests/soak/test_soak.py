"""A short soak in the interpreter, and that one can fail."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.pages import section
from proving.evidence import EVIDENCE, load
from proving.soak.command import main
from proving.soak.measure import CALLS, MIB, SLACK, growths
from proving.soak.report import summary
from proving.soak.soak import soak
from proving.soak.work import SIZES

from ..calling import printed
from ..properties.problems import MadeCall
from ..thorough import THOROUGH


@THOROUGH
def test_a_short_soak_finds_nothing_wrong_and_says_what_it_did(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--minutes", "0.2", "--seed", "0", "--device", "cpu", "--revision", "none"]
    status = main([*options, "--record", str(checkout)])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "forward calls" in said
    written = section(checkout / EVIDENCE, "soak")
    assert "seed 0" in written
    assert written == summary(load(checkout, "soak"))


@THOROUGH
def test_a_soak_tells_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MadeCall, output: object) -> None:
        raise AssertionError(f"wrong in {self.call}")

    monkeypatch.setattr(MadeCall, "check", refuse)
    # Kernels of each kind are generated first, for seconds.
    monkeypatch.setitem(SIZES, "cpu", replace(SIZES["cpu"], kinds={"calls": 1, "steps": 1, "backward": 1}))
    result = soak(0.05, 1, torch.device("cpu"), progress=False)
    assert not result.ok
    assert "AssertionError: wrong in Call(kind=" in result.failures[0]


@pytest.mark.parametrize("leak", [0, 200], ids=["none", "200 bytes a call"])
def test_growth_is_told_from_noise(leak: int) -> None:
    noise = random.Random(0)
    quiet = dict.fromkeys(SLACK, 0.0) | {"plans": 500, "Python objects": 10**5}
    host = [(10**9 + noise.randrange(10**7) + leak * 20_000 * i) / MIB for i in range(24)]
    samples = [quiet | {"host in use, MiB": held, CALLS: 1000 * i} for i, held in enumerate(host)]
    verdicts = {growth.what: growth.ok for growth in growths(samples[0], samples)}
    assert verdicts.pop("host in use, MiB") == (leak == 0)
    assert all(verdicts.values())


_KEEPS_EVERY_SECOND_BLOCK = """
import torch
from proving.soak.measure import held

def at():
    now = held(torch.device("cpu"), 0)
    return now["host in use, MiB"], now["held free by malloc, MiB"]

empty = at()
kept = [bytearray(1 << 16) for _ in range(1600)]
full = at()
# What stays is between what goes, so that no arena shrinks.
del kept[::2]
half = at()
print(full[0] - empty[0], half[0] - empty[0], sum(half) - sum(full))
"""


@THOROUGH
def test_what_malloc_holds_free_is_no_leak_and_what_is_allocated_is(repository: Path) -> None:
    # In a process of its own: in one that has run for long, arenas have pages that are free and not resident.
    full, half, resident = map(float, printed(_KEEPS_EVERY_SECOND_BLOCK, PYTHONPATH=str(repository)).split())
    assert full == pytest.approx(100, abs=10)
    assert half == pytest.approx(50, abs=10)
    assert resident > -10

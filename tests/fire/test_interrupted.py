"""Killed at any step, out of space, or run beside another: what a process finds afterwards is the old or the new."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import normforge
from normforge.call_kinds import CallKind
from normforge.codegen import cli, manifest
from normforge.errors import CacheError, RecordError, TableError
from normforge.selection import dispatch, on_demand
from normforge.selection.recording import read

from ..thorough import THOROUGH
from .faults import KILL, NO_SPACE, at_each_step, child, ended
from .world import PASSING, loads, snapshot, whole

# They share a mode that loses its kernel for long rows, and one that gains it; each has modes of its own.
BEFORE = "groups: {a: {norm: layer, dtype_in: bf16}, b: {norm: rms, dtype_in: [bf16, fp32], n: n128}}\n"
AFTER = "groups: {a: {norm: layer, dtype_in: [bf16, fp16], n: n128}, b: {norm: rms, dtype_in: bf16}}\n"


@pytest.fixture
def world(tmp_path: Path) -> Path:
    (tmp_path / "before.yaml").write_text(BEFORE)
    (tmp_path / "after.yaml").write_text(AFTER)
    return tmp_path


def generate(world: Path, name: str, times: int = 1) -> int:
    argv = ["--manifest", str(world / f"{name}.yaml"), "--out", str(world / "k")]
    return max(cli.main(argv) for _ in range(times))


def made(world: Path, name: str) -> dict[str, bytes | str]:
    """What `generate` makes of a manifest, and that it makes it over whatever is there."""
    assert generate(world, name) == 0
    whole(world / "k")
    return left(world)


def left(world: Path) -> dict[str, bytes | str]:
    """What lies in the folder and is somebody's."""
    return {path: data for path, data in snapshot(world / "k").items() if not path.startswith(PASSING)}


def table(world: Path) -> bytes:
    return (world / "k" / "dispatch.py").read_bytes()


@pytest.mark.parametrize("fault", [KILL, pytest.param(NO_SPACE, marks=THOROUGH)])
def test_a_run_that_meets_a_fault_at_any_step(fault: str, world: Path) -> None:
    after = made(world, "after")
    before = made(world, "before")
    shutil.copytree(world / "k", world / "kept")
    seen = []
    for status in at_each_step(fault, partial(generate, world, "after"), world / "k", world / "errors"):
        loads(world / "k")
        now = table(world)
        assert now in (before["dispatch.py"], after["dispatch.py"])
        seen.append(now)
        if status == 0:
            # What could not be done did not have to be: a folder made that is there, a lock removed.
            assert left(world) == after
        elif status == 2:
            line = (world / "errors").read_text().splitlines()[-1]
            assert line.startswith("python generate.py: error: ")
            assert "No space left on device" in line
        assert made(world, "after") == after
        shutil.rmtree(world / "k")
        shutil.copytree(world / "kept", world / "k")
    assert len(set(seen)) == 2, "no step before or none behind the table was met"
    assert len(seen) >= len(after)


def test_runs_into_one_folder_at_once(world: Path) -> None:
    after, before = made(world, "after"), made(world, "before")
    children = [child(partial(generate, world, name, 8), world / "errors") for name in ("before", "after", "after")]
    looked = 0
    until = time.monotonic() + 60
    while any(each.is_alive() for each in children) and time.monotonic() < until:
        first = stamp(world)
        now = table(world)
        assert now in (before["dispatch.py"], after["dispatch.py"])
        try:
            loads(world / "k")
        except (AssertionError, OSError, TableError):
            # Another table was put in place meanwhile: what was read is of both.
            assert stamp(world) != first
        looked += 1
    assert [ended(each) for each in children] == [0] * 3, (world / "errors").read_text()
    assert looked
    assert left(world) in (before, after)


def stamp(world: Path) -> tuple[int, int]:
    status = (world / "k" / "dispatch.py").stat()
    return status.st_mtime_ns, status.st_ino


def miss() -> int:
    """Ask for what normforge's own table lacks, without a row, so that nothing is launched."""
    normforge.load_instances()
    on_demand._package.cache_clear()
    normforge.layernorm2d_fwd(torch.empty(0, 64), fquant="dynamic", rounding="truncate")
    return 0


def refused_miss() -> int:
    try:
        return miss()
    except CacheError:
        return 2


@THOROUGH
@pytest.mark.parametrize("fault", [KILL, pytest.param(NO_SPACE, marks=THOROUGH)])
def test_a_cache_that_meets_a_fault_at_any_step(fault: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it is of use to the next process."""
    monkeypatch.delenv("NORMFORGE_INSTANCES", raising=False)
    monkeypatch.delenv("NORMFORGE_ON_MISS", raising=False)
    cache, errors = world / "cache", world / "errors"
    monkeypatch.setenv("NORMFORGE_CACHE", str(cache))
    for _ in at_each_step(fault, refused_miss, cache):
        assert ended(child(check_miss if fault == KILL else miss, errors)) == 0, errors.read_text()
        shutil.rmtree(cache)


def check_miss() -> int:
    miss()
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    y = normforge.layernorm2d_fwd(x, fquant="dynamic", rounding="truncate").y
    return int(y.tolist() != [[-84, -42, 0, 127]])


def record(path: Path) -> int:
    try:
        with normforge.record(path):
            for n in (64, 200, 300):
                normforge.layernorm2d_fwd(torch.empty(0, n))
                dispatch.tell(partial(CallKind, "ln_fwd_fp32", (("n", n),), rows="few"))
    except RecordError:
        return 2
    return 0


@THOROUGH
@pytest.mark.parametrize("fault", [KILL, NO_SPACE])
def test_a_recording_that_meets_a_fault_at_any_step(fault: str, world: Path) -> None:
    everything = ["ln_fwd_fp32_n128", "ln_fwd_fp32_n256", "ln_fwd_fp32_n512"]
    path = world / "needed.yaml"
    for _ in at_each_step(fault, partial(record, path), world):
        if path.exists():
            found = [instance.name for instance in manifest.load(path).instances]
            assert found == everything[: len(found)]
            # Each call comes behind its instance.
            kept = {kind.n for kind in read(path, path.read_bytes()).calls}
            assert kept in (set((64, 200, 300)[:count]) for count in (len(found) - 1, len(found)))
        assert ended(child(partial(record, path))) == 0
        assert [instance.name for instance in manifest.load(path).instances] == everything
        assert {kind.n for kind in read(path, path.read_bytes()).calls} == {64, 200, 300}
        path.unlink()

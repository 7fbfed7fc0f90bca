"""The start-up benchmark: which process finds what compiled, and what becomes of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import startup
from benchmarks.errors import UsageError
from benchmarks.startup import WAYS, Environment, Sample, Way, measure, start

from ..thorough import THOROUGH

BY_NAME = {way.name: way for way in WAYS}


class Processes:
    """Processes that are not started: each takes a second more than the one before."""

    def __init__(self) -> None:
        self.asked: list[tuple[Way, Environment]] = []

    def run(self, way: Way, variables: Environment) -> Sample:
        self.asked.append((way, variables))
        seconds = float(len(self.asked))
        return Sample(total_s=10 + seconds, norm_s=seconds)

    def variables(self, name: str, variable: str) -> list[str]:
        return [variables[variable] for way, variables in self.asked if way.name == name]


@pytest.mark.parametrize("runs", [1, 3])
def test_each_process_finds_what_its_way_says(runs: int, tmp_path: Path) -> None:
    processes, prepared = Processes(), list[Path]()
    rows = measure(tmp_path, runs, prepared.append, processes.run)
    assert [(row.way, row.runs) for row in rows] == [(way.name, runs) for way in WAYS]
    (kernels,) = prepared
    # An empty cache each, or one that an uncounted process has filled.
    for name, filled in (("cold", False), ("warm", True), ("aot", False), ("aot-again", True)):
        caches = processes.variables(name, "TRITON_CACHE_DIR")
        assert len(caches) == runs + filled
        assert len(set(caches)) == (1 if filled else runs)
        assert set(processes.variables(name, "NORMFORGE_AOT")) == {str(kernels) if "aot" in name else ""}
    every = {cache for way in WAYS for cache in processes.variables(way.name, "TRITON_CACHE_DIR")}
    assert len(every) == 2 * runs + 3
    # What should find everything may not compile, once there is something to find.
    assert processes.variables("cold", "NORMFORGE_FROZEN") == ["0"] * runs
    assert processes.variables("warm", "NORMFORGE_FROZEN") == ["0", *["1"] * runs]
    assert processes.variables("aot", "NORMFORGE_FROZEN") == ["1"] * runs
    assert processes.variables("aot-again", "NORMFORGE_FROZEN") == ["0", *["1"] * runs]


def test_the_median_counts(tmp_path: Path) -> None:
    rows = {row.way: row for row in measure(tmp_path, 3, lambda folder: None, Processes().run)}
    # Three processes are not counted; then the ways take turns, five at a time.
    assert (rows["torch"].norm_s_min, rows["torch"].norm_s, rows["torch"].norm_s_max) == (4, 9, 14)
    assert (rows["aot"].norm_s, rows["aot"].total_s) == (12, 22)


@THOROUGH
@pytest.mark.parametrize("name", ["torch", "cold"])
def test_a_process_runs_to_its_first_result(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sample = start(BY_NAME[name], {"TRITON_CACHE_DIR": str(tmp_path)}, device="cpu")
    assert 0 < sample.norm_s < sample.total_s


@THOROUGH
def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match=r"benchmarks.first_result .* failed:\n(.|\n)*RuntimeError"):
        start(BY_NAME["torch"], {}, device="nowhere")


@THOROUGH
def test_what_is_compiled_ahead_is_what_the_process_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    startup.compile_ahead(tmp_path / "kernels", "sm_90")
    index = json.loads((tmp_path / "kernels" / "index.json").read_text())
    kernels = {row["key"].partition("(")[0].rpartition(":")[2] for row in index["kernels"]}
    assert {name.rpartition("_")[0] for name in kernels} >= {"ln_fwd_bf16_mv_one", "ln_bwd_bf16_one", "sum"}

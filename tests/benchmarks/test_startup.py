"""The start-up benchmark: which process finds what compiled, and what becomes of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import startup
from benchmarks.errors import UsageError
from benchmarks.startup import WAYS, start

from ..thorough import THOROUGH

BY_NAME = {way.name: way for way in WAYS}


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

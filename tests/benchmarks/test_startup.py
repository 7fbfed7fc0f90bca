"""The start-up benchmark: which process finds what compiled, and what becomes of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import startup

from ..thorough import THOROUGH


@THOROUGH
def test_what_is_compiled_ahead_is_what_the_process_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    startup.compile_ahead(tmp_path / "kernels", "sm_90")
    index = json.loads((tmp_path / "kernels" / "index.json").read_text())
    kernels = {row["key"].partition("(")[0].rpartition(":")[2] for row in index["kernels"]}
    assert {name.rpartition("_")[0] for name in kernels} >= {"ln_fwd_bf16_mv_one", "ln_bwd_bf16_one", "sum"}

"""GroupNorm from a manifest's folder: served, missing, and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import normforge
from normforge import errors
from normforge.tools.cli import main

pytestmark = pytest.mark.usefixtures("fresh_table")

MANIFEST = """
buckets: {n64: 1..64, nbig: 65..}
groups:
  unet: {norm: group, direction: [fwd, bwd], dtype_in: fp32, activation: [none, silu], n: all}
  rows: {norm: layer, dtype_in: fp32, n: n64}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    manifest, folder = tmp_path / "mine.yaml", tmp_path / "kernels"
    manifest.write_text(MANIFEST)
    assert main(["generate", "--manifest", str(manifest), "--out", str(folder)]) == 0
    return folder


def test_a_manifests_kernels_serve_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_ON_MISS", "error")
    normforge.load_instances(folder)
    assert {"gn_fwd_fp32_n64", "gn_bwd_fp32_silu_nbig"} <= {entry.name for entry in normforge.instances()}
    for positions in (5, 60):
        x = torch.randn(2, 8, positions, requires_grad=True)
        y = normforge.group_norm(x, 2, activation="silu")
        want = functional.silu(functional.group_norm(x, 2))
        torch.testing.assert_close(y, want)
        found, wanted = (torch.autograd.grad(each.square().sum(), x)[0] for each in (y, want))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.MissingInstanceError) as missed:
        normforge.group_norm(x.detach().bfloat16(), 2)
    said = str(missed.value)
    assert "serves gn_fwd_bf16 with N = 240" in said
    assert "    norm: group\n    dtype_in: bf16\n    n: nbig\n" in said
    with pytest.raises(errors.MissingInstanceError, match="gn_fwd_fp32_cl with N = 240"):
        normforge.group_norm(x.detach().movedim(1, 2).contiguous().movedim(2, 1), 2)


def test_a_recording_makes_the_kernels_that_were_asked_for(tmp_path: Path) -> None:
    needed, folder = tmp_path / "needed.yaml", tmp_path / "kernels"
    with normforge.record(needed):
        normforge.group_norm(torch.randn(1, 4, 9), 2, activation="silu")
    assert main(["generate", "--manifest", str(needed), "--out", str(folder)]) == 0
    normforge.load_instances(folder)
    assert [entry.name for entry in normforge.instances()] == ["gn_fwd_fp32_silu_n128"]

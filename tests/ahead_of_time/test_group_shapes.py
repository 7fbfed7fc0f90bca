"""What is listed of GroupNorm for a shape is what calls of it launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from normforge.ahead_of_time.compile_keys import compile_keys
from normforge.codegen.tiling import SMALL_M, SOME_M
from normforge.errors import FrozenError
from normforge.kernels.gpu import named_target
from normforge.kernels.obtain import obtain
from normforge.tools import cli

from ..stand_in_driver import driving


def test_any_number_of_samples_is_one_of_each_class() -> None:
    def told(shape: str, **options: Any) -> list[tuple[str, ...]]:
        return [key.rows for key in compile_keys(modes=["gn_fwd_bf16"], shapes=[shape], arch="sm_90", **options)]

    few, some = SMALL_M, SOME_M
    assert told("*x64x9/32") == [("few", "some", "many")]
    for m, word in ((few, "few"), (few + 32, "some"), (some, "some"), (some + 32, "many")):
        assert told(f"{m // 32}x64x9/32") == [(word,)]
    # InstanceNorm: one sample has some groups, or many.
    assert told(f"*x{few + 1}x9/{few + 1}") == [("some", "many")]
    assert told(f"*x{some + 1}x9/{some + 1}") == [("many",)]
    assert told("*x64x9/32", rows=["few", "many", "most"]) == [("few", "many", "most")]


def test_rows_and_shapes_are_listed_together() -> None:
    modes = ["ln_fwd_bf16", "gn_fwd_bf16_silu"]
    found = compile_keys([64], modes, shapes=["2x64x8x8/32", "2x64x8x8/32"], arch="sm_90", rows=["few"])
    assert [(key.instances, key.n) for key in found] == [(("ln_fwd_bf16_n128",), 64), (("gn_fwd_bf16_silu_n128",), 128)]


MANIFEST = """
buckets: {n64: 1..64, nbig: 65..}
groups:
  unet: {norm: group, direction: [fwd, bwd], dtype_in: bf16, channels_last: [false, true], n: nbig}
  rows: {norm: layer, dtype_in: bf16, n: n64}
"""


def test_the_command_takes_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "needed.yaml"
    manifest.write_text(MANIFEST)
    listing = ["warmup", "--list", "--arch", "sm_90"]
    assert cli.main([*listing, "--shape", "2x64x8x8/32,*x64x16x16/32", "--y", "same,fp32", "gn_fwd_bf16"]) == 0
    told = capsys.readouterr().out
    assert "x bf16, weight bf16, bias bf16, y fp32" in told
    of_manifest = [*listing, "--manifest", str(manifest)]
    assert cli.main([*of_manifest, "--shape", "2x64x8x8/32", "--n", "64", "--rows", "few"]) == 0
    instances = {line.split()[0] for line in capsys.readouterr().out.splitlines()[2:-2]}
    assert instances == {
        "ln_fwd_bf16_n128",
        *(f"gn_{way}_bf16{lies}_n128" for way in ("fwd", "bwd") for lies in ("", "_cl")),
    }
    assert cli.main([*of_manifest, "--n", "4096"]) == 2
    assert f"no instance of {manifest} serves N = 4096" in capsys.readouterr().err


def test_jax_has_no_such_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normforge.tools.arguments.interpreting", lambda: False)
    out = str(tmp_path / "kernels")
    argv = ["aot", "--for", "jax", "--arch", "sm_90", "--shape", "2x64x8x8/32", "--out", out, "gn_fwd_bf16"]
    assert cli.main(argv) == 2
    assert "gn_fwd_bf16 is GroupNorm's, which normforge.jax has not" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.usefixtures("nothing_compiled")
def test_a_frozen_call_says_how_to_compile_for_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMFORGE_FROZEN", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    key, *_ = compile_keys(modes=["gn_fwd_bf16_cl"], shapes=["1x128x8x8/32"], arch="sm_90")
    with driving(), pytest.raises(FrozenError, match=r"C=128.*aot --shape`, and x's shape with how many"):
        obtain(key.key, key.function, named_target("sm_90"), 0)

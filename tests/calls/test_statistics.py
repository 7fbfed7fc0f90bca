"""Statistics of rows alone: what `save_mv` saves, by kernels that write no y."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.codegen.errors import IllegalCombinationError
from normforge.codegen.model import Mode
from normforge.codegen.values import DType, FusedAdd, Norm
from normforge.errors import ShapeError
from normforge.families import eager
from normforge.tools import cli

from ..calling import each_device

# A length of each pipeline, ragged or not.
LENGTHS = (1, 13, 100, 1024, 1500, 4099, 20000)


def statistics(norm: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if norm == "rms":
        return (normforge.rms_statistics(x, eps=1e-6),)
    return normforge.layer_statistics(x)


def saved(norm: str, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    if norm == "rms":
        return (normforge.rmsnorm2d_fwd(x, save_mv=True).rstd,)
    return normforge.layernorm2d_fwd(x, save_mv=True)[3:]


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_statistics_are_those_of_fp64_and_those_that_norms_save(
    norm: str, n: int, dtype: torch.dtype, device: str
) -> None:
    x = (torch.randn(3, 2, n) + 2).to(device, dtype)
    found = statistics(norm, x)
    *means, rstd = eager.statistics(norm, x.double(), 1e-5 if norm == "layer" else 1e-6)
    wanted = [each for each in (*means, rstd) if each is not None]
    assert [each.shape for each in found] == [x.shape[:-1]] * len(wanted)
    for each, its, beside in zip(found, wanted, saved(norm, x), strict=True):
        assert each.dtype is torch.float32
        torch.testing.assert_close(each.double(), its, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(each, beside, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("n", [40, 1500, 20000])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_row_has_the_same_statistics_in_every_batch(norm: str, n: int) -> None:
    x = torch.randn(9, n).bfloat16()
    with normforge.batch_invariant():
        alone = [statistics(norm, row.unsqueeze(0)) for row in x]
        for at, together in enumerate(statistics(norm, x)):
            assert torch.equal(torch.cat([row[at] for row in alone]), together)


def test_none_is_the_eps_of_rms_norm_and_a_known_call_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wanted = torch.zeros(2, 8), torch.full((2,), torch.finfo(torch.float32).eps).rsqrt()
    assert torch.equal(normforge.rms_statistics(x), wanted)
    monkeypatch.delattr("normforge.families.statistics.check_normalised")
    assert torch.equal(normforge.rms_statistics(x), wanted)


@pytest.mark.parametrize(
    ("beside", "message"),
    [({"save_mv": False}, "no save_mv false"), ({"fadd": FusedAdd.PRE_ADD}, "no fadd pre_add"), ({}, "")],
    ids=str,
)
def test_modes_that_write_no_y_lack_what_y_follows_from(beside: dict[str, Any], message: str) -> None:
    axes: dict[str, Any] = {"save_mv": True, "statistics_only": True, **beside}
    if not message:
        assert Mode(Norm.RMS, DType.BF16, DType.BF16, **axes).name == "rms_fwd_bf16_mv_only"
        return
    with pytest.raises(IllegalCombinationError, match=f"writes no y, and has {message}; use another"):
        Mode(Norm.RMS, DType.BF16, DType.BF16, **axes)


def test_the_command_runs_and_holds_them_against_the_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-m=3", "-n=300", "-norm=layer", "-save_mv=1", "-statistics_only=1", "-repeat=1", "-warmup=0")
    assert cli.main(["run", *options]) == 0
    assert "ln_fwd_fp16_mv_only" in capsys.readouterr().out


@pytest.mark.parametrize("function", [normforge.rms_statistics, normforge.layer_statistics])
def test_rows_without_a_dimension_are_refused(function: Any) -> None:
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"^x has shape \(\); it takes \(\.\.\., N\), one dimension or more$"):
            function(torch.ones(()))

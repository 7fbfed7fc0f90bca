"""`normforge run -bwd 1`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from normforge import reference
from normforge.codegen.values import Norm
from normforge.families.in_parts import InParts
from normforge.reference.gradients import ReferenceGradients
from normforge.tools import cli
from normforge.tools.compare import ModulatedGradients

SMALL = ["run", "-m=5", "-n=130", "-bwd=1"]


@pytest.mark.parametrize(
    ("arguments", "instance", "gradients"),
    [
        (["-norm=layer"], "ln_bwd_fp16_n256", {"dx", "dweight", "dbias"}),
        (["-norm=rms", "-prec_i=bf16"], "rms_bwd_bf16_n256", {"dx", "dweight"}),
        (["-fadd=1", "-prec_i=bf16"], "ln_bwd_bf16_addst_n256", {"dx", "dweight", "dbias"}),
        (["-xbias=1", "-norm=rms"], "rms_bwd_fp16_xb_n256", {"dx", "dweight", "dx_bias"}),
        (["-xbias=1", "-fadd=1"], "ln_bwd_fp16_addst_n256", {"dx", "dweight", "dbias", "dx_bias"}),
        (["-xbias=1", "-fadd=1", "-norm=rms"], "rms_bwd_fp16_addst_n256", {"dx", "dweight", "dx_bias"}),
        (["-dropout=0.3", "-fadd=1"], "ln_bwd_fp16_drop_addst_n256", {"dx", "dweight", "dbias", "ddropped"}),
        (
            ["-dropout=0.3", "-fadd=1", "-xbias=1", "-norm=rms"],
            "rms_bwd_fp16_drop_addst_n256",
            {"dx", "dweight", "dx_bias", "ddropped"},
        ),
        (["-x_stride=150", "-y_stride=140"], "ln_bwd_fp16_n256", {"dx", "dweight", "dbias"}),
    ],
)
def test_every_gradient_is_checked(
    arguments: list[str], instance: str, gradients: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SMALL, "-json", *arguments]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["instance"] == instance
    assert set(line["errors"]) == gradients
    assert line["valid"] is True


def test_a_wrong_gradient_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    honest = reference.BACKWARD[Norm.LAYER]

    def spoilt(**operands: Any) -> ReferenceGradients:
        expected = honest(**operands)
        return expected._replace(dweight=expected.dweight * 1.01)

    monkeypatch.setitem(reference.BACKWARD, Norm.LAYER, spoilt)
    assert cli.main(SMALL) == 1
    assert "no: dweight differ from the reference" in capsys.readouterr().out


MODULATED = ["run", "-m=27", "-n=48", "-samples=3", "-bwd=1"]
OF_MODULATION = {"dx", "dscale", "dshift", "dweight"}


@pytest.mark.parametrize(
    ("arguments", "instance", "others"),
    [
        ([], "ln_bwd_fp16_mod_n128", {"dbias"}),
        (["-norm=rms", "-prec_i=bf16"], "rms_bwd_bf16_mod_n128", set()),
        (["-norm=rms", "-fadd=1", "-stride=60"], "rms_bwd_fp16_addst_mod_n128", {"dresidual"}),
        (
            ["-fadd=1", "-xgate=1", "-prec_i=bf16", "-x_stride=56"],
            "ln_bwd_bf16_xg_addst_mod_n128",
            {"dbias", "dresidual", "dgate"},
        ),
        (["-fadd=1", "-xgate=1", "-norm=rms"], "rms_bwd_fp16_xg_addst_mod_n128", {"dresidual", "dgate"}),
        (["-fadd=1", "-xgate=1", "-prec_i=fp32"], "ln_bwd_fp32_xg_addst_mod_n128", {"dbias", "dresidual", "dgate"}),
    ],
)
def test_every_gradient_of_modulated_rows_is_checked(
    arguments: list[str], instance: str, others: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*MODULATED, "-json", *arguments]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["instance"] == instance
    assert set(line["errors"]) == OF_MODULATION | others
    assert line["valid"] is True


@pytest.mark.parametrize("name", ModulatedGradients._fields)
def test_a_wrong_gradient_of_modulated_rows_is_a_failure(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, place = InParts.gradients, ModulatedGradients._fields.index(name)

    def spoilt(*given: Any) -> list[torch.Tensor | None]:
        found = list(honest(*given))
        gradient = found[place]
        assert gradient is not None
        found[place] = gradient.index_fill(-1, torch.tensor([5]), 0.0)
        return found

    monkeypatch.setattr(InParts, "gradients", spoilt)
    assert cli.main([*MODULATED, "-fadd=1", "-xgate=1"]) == 1
    assert f"no: {name} differ from the reference" in capsys.readouterr().out


def test_samples_are_of_as_many_rows_as_kernels_take(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes, problem in (
        (
            ["-m=21", "-samples=3"],
            "-m 21 with -samples 3 is 7 rows a sample, and the backward kernels take 8 or more; pass -m 24, say",
        ),
        (["-m=262152", "-samples=32769"], "-samples 32769 does not go with -bwd 1, whose kernels take 32768 at most"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["run", "-n=48", "-bwd=1", *sizes])
        assert stopped.value.code == 2
        assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-fquant=2"], "-fquant 2 does not go with -bwd 1: quantised outputs have no gradient"),
        (["-fadd=2"], "-fadd 2 does not go with -bwd 1: its sum is not stored; use -fadd 1"),
        (["-save_mv=1"], "-save_mv 1 does not go with -bwd 1: mean and rstd are always saved for it"),
        (["-prec_o=fp16"], "-prec_o fp16 does not go with -bwd 1"),
    ],
)
def test_what_has_no_gradient_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*SMALL, *arguments])
    assert stopped.value.code == 2
    assert problem in capsys.readouterr().err

"""The survey of foreign norm classes, on classes of our own."""

from __future__ import annotations

import pytest
import torch

from proving.models.command import LIBRARIES, summary, survey

from ..nn import models


def test_classes_are_sorted_by_what_patch_makes_of_them() -> None:
    classes = [models.LlamaRMSNorm, models.HalfOffsetRMSNorm, models.ScaledLayerNorm, torch.nn.LayerNorm]
    # Which needs more than a size.
    found = survey([*classes, torch.nn.Bilinear], {"transformers": "0"})
    outcomes = {row["class"]: (row["outcome"], row["formula or reason"]) for row in found.rows}
    assert outcomes.pop("LlamaRMSNorm") == ("taken", "`weight * cast(h)`, cast to x's dtype")
    assert outcomes.pop("LayerNorm") == ("taken", "torch's own")
    assert outcomes.pop("Bilinear") == ("not tried", "")
    assert outcomes.pop("ScaledLayerNorm") == ("taken", "its own forward, which calls torch's function")
    ((outcome, reason),) = outcomes.values()
    assert outcome == "skipped"
    assert reason.startswith("its forward computes something else")
    page = summary(found)
    assert "**3 of 4 classes are taken.** 1 more" in page
    assert "| taken | torch's own | 1 | LayerNorm |" in page


# By library, names of norms and of what are none.
NAMES = {
    "transformers": ("LlamaRMSNorm T5LayerNorm MambaRMSNormGated SamLayerNorm2d", "HubertLayerNormConvLayer Norm"),
    "diffusers": ("WanRMS_norm FP32LayerNorm MochiChunkedGroupNorm3D LpNorm", "AdaLayerNormZero AdaGroupNorm"),
    "timm": ("RmsNorm LayerNorm2dFp32 GroupNorm1Act SimpleNorm2d", "NormMlp BatchNormAct2d ConvNormAct"),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_norms_are_known_by_their_names(library: str) -> None:
    norms, others = (list(map(LIBRARIES[library].norm.search, names.split())) for names in NAMES[library])
    assert all(norms)
    assert not any(others)

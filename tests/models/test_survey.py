"""The survey of foreign norm classes, on classes of our own."""

from __future__ import annotations

import torch

from proving.models.survey import NORM, summary, survey, table

from ..nn import models


def test_classes_are_sorted_by_what_patch_makes_of_them() -> None:
    class Needy(torch.nn.Module):
        def __init__(self, config: object, more: object) -> None:
            super().__init__()

    class Wide(models.LlamaRMSNorm):
        def __init__(self, n: int) -> None:
            super().__init__()

    class Gemma(models.HalfOffsetRMSNorm):
        def __init__(self, n: int) -> None:
            super().__init__()

    class GemmaRMSNorm(Gemma):
        pass

    class WideRMSNorm(Wide):
        pass

    found = survey([WideRMSNorm, GemmaRMSNorm, models.ScaledLayerNorm, torch.nn.LayerNorm, Needy])
    assert found.taken == {"`weight * cast(h)`, cast to x's dtype": ["WideRMSNorm"], "torch's own": ["LayerNorm"]}
    reasons = {name: reason for reason, names in found.skipped.items() for name in names}
    assert reasons.keys() == {"GemmaRMSNorm", "ScaledLayerNorm"}
    assert reasons["GemmaRMSNorm"].startswith("its forward computes something else")
    assert reasons["ScaledLayerNorm"].startswith("it is a subclass of torch's")
    assert (found.tried, found.not_made) == (4, ["Needy"])
    page = summary(table(found, {"transformers": "0"}))
    assert "**2 of 4 classes are taken.** 1 more" in page
    assert "| taken | torch's own | 1 | LayerNorm |" in page


def test_a_norm_is_known_by_the_end_of_its_name() -> None:
    named = ("LlamaRMSNorm", "T5LayerNorm", "MambaRMSNormGated", "SamLayerNorm2d", "HubertLayerNormConvLayer", "Norm")
    assert [bool(NORM.search(name)) for name in named] == [True, True, True, True, False, False]

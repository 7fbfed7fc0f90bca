"""Patched models of timm compute what unpatched ones do."""

from __future__ import annotations

import pytest
import torch

from tests.thorough import THOROUGH

from .alike import agree

pytest.importorskip("timm", reason="an extra of its own: make test-clients installs it")

from .images import IMAGES, tiny

# `make test` runs one plain transformer and one with windows.
_QUICK = {"vit_tiny_patch16_224", "convnext_tiny"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[THOROUGH] * (name not in _QUICK)) for name in IMAGES])
def test_a_model_is_as_before(name: str) -> None:
    image = IMAGES[name]
    pixels = torch.randn(1, 3, image.side, image.side)
    agree(tiny(name), lambda model: model(pixels), frozenset(image.left))

"""Patched models of diffusers compute what unpatched ones do."""

from __future__ import annotations

import pytest

from tests.thorough import THOROUGH

from .alike import agree

pytest.importorskip("diffusers", reason="an extra of its own: make test-clients installs it")

from .diffusion import DIFFUSION, inputs, tiny

# `make test` runs one with GroupNorm and one with modulated norms.
_QUICK = {"UNet2DModel", "DiTTransformer2DModel"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[THOROUGH] * (name not in _QUICK)) for name in DIFFUSION])
def test_a_model_is_as_before(name: str) -> None:
    given = inputs(name)
    agree(tiny(name), lambda model: model(**given, return_dict=False))

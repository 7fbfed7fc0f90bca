"""torchao quantises the weights of patched models as of others, patched before or after."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

import normforge
from tests.thorough import THOROUGH

pytest.importorskip("torchao", reason="an extra of its own: make test-clients installs it")
pytest.importorskip("transformers", reason="an extra of its own: make test-clients installs it")

from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

from .alike import classes_of
from .families import language_model

_TOKENS = torch.arange(3, 13)[None]
_CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": lambda: Int8WeightOnlyConfig(version=2),
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=attrgetter("int4")(torch)),
    "float8": lambda: Float8WeightOnlyConfig(version=2),
}


@pytest.mark.parametrize("quantisation", ["int8", *(pytest.param(one, marks=THOROUGH) for one in ("int4", "float8"))])
def test_quantised_weights(quantisation: str) -> None:
    """Weights alone are quantised: activations that differ by a rounding are not rounded to other numbers."""
    theirs, before, after = (language_model("llama") for _ in range(3))
    normforge.patch(before)
    for model in (theirs, before, after):
        quantize_(model, _CONFIGS[quantisation]())
    classes = classes_of(theirs)
    normforge.patch(after)
    with torch.no_grad():
        logits = theirs(_TOKENS).logits
        for model in (before, after):
            torch.testing.assert_close(model(_TOKENS).logits, logits, rtol=2e-5, atol=2e-5)
            normforge.unpatch(model)
            assert classes_of(model) == classes
            assert torch.equal(model(_TOKENS).logits, logits)

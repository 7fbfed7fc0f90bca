"""What a residual added behind the norm does not go with; random calls of tests/properties have the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import normforge
from normforge.errors import ConflictError, IllegalCombinationError

from ..calling import each_norm, same_bits

ADDED: dict[str, Any] = {"fadd": "post_add"}


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ({"fquant": "dynamic"}, IllegalCombinationError),
        ({"dropout_p": 0.5, "dropout_rng": (1, 2)}, IllegalCombinationError),
        ({"residual": None}, ConflictError),
        ({"residual_out": torch.zeros(5, 64)}, ConflictError),
    ],
    ids=("fquant", "dropout_p", "residual", "residual_out"),
)
def test_refusals(others: dict[str, Any], error: type[Exception]) -> None:
    x = torch.randn(5, 64)
    with pytest.raises(error, match="post_add"):
        normforge.layernorm2d_fwd(x, **{"residual": x.clone(), **ADDED, **others})


@each_norm
def test_autocast_leaves_the_dtype_of_the_residual(norm: str) -> None:
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 64)
    function = getattr(normforge, f"{norm}_norm_add")
    with torch.autocast("cpu", torch.bfloat16):
        y = function(x, residual)
    assert same_bits(y, function(x, residual))
    assert y.dtype is torch.float32

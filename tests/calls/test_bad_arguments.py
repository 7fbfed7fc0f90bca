"""Every way to call wrongly has an error of its own type, which names the argument, what it got and what it takes.

What may be wrong with one argument of any function, whatever the others are, is in `test_wrong_tensors`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import normforge
from normforge import errors
from normforge.errors import ArgumentError, ConflictError, DeviceError, DTypeError, LayoutError, ShapeError
from normforge.selection import dispatch

from ..calling import table_at
from .test_wrong_tensors import CALLS, E4M3, FOLLOWED, MODULATIONS, WHICH, Call, M, N, refusal

X, VECTOR, ONE = torch.linspace(-1, 1, M * N).view(M, N), torch.ones(N), torch.ones(1)
# Four strides.
PERMUTED = torch.zeros(2, 2, 2, 2, N).permute(3, 2, 1, 0, 4)
PLANES = "(shape (2, 2, 2, 2, 64), strides (64, 128, 256, 512, 1)) do not collapse to 3 row strides or fewer; pass "
BYTES = torch.zeros(2 * M * N, dtype=torch.int8)

PLAIN = ("LayerNorm", "RMSNorm", "LayerNormAdd", "RMSNormAdd", "AddLayerNorm", "AddRMSNorm")
MADE: dict[str, Call] = {
    "gated module": (normforge.GatedRMSNorm, {"hidden_size": 24}),
    "gated layer module": (normforge.GatedLayerNorm, {"hidden_size": 24}),
    "group module": (normforge.GroupNorm, {"num_groups": 2, "num_channels": 8}),
    **{name: (getattr(normforge, name), {"normalized_shape": 40}) for name in PLAIN},
}

REFUSED: dict[str, dict[str, list[tuple[dict[str, Any], str]]]] = table_at(
    Path(__file__).with_name("refused.yaml"), globals()
)
REFUSED["modulated samples"] = {
    "ShapeError": [
        ({name: torch.ones(shape)}, f"{name} has shape {shape} and x (2, 3, 8); it takes (2, 8) or (2, 3, 8) or (8,)")
        for shape in ((2, 3), (8, 3), (3, 8), (1, 8), (2, 1, 8))
        for name in MODULATIONS
    ]
}


# Calls that leave keys as like as can be to those of the bad ones.
GOOD: tuple[dict[str, Any], ...] = (
    {"bias": VECTOR, "weight": VECTOR},
    {"x_bias": VECTOR, "out_dtype": torch.float16},
    {"residual": X.clone(), "fadd": 1, "residual_out": torch.zeros(M, N)},
    {"residual": X.clone(), "fadd": 2},
    {"out": torch.zeros(M, N)},
    {"fquant": "smooth_dynamic", "smooth_scale": VECTOR, "save_mv": True},
    {"fquant": 2, "out": torch.zeros(M, N, dtype=torch.int8), "rounding": "truncate"},
    {"fquant": 2, "out_dtype": E4M3, "scale_dtype": torch.float16, "save_mv": 1},
    {"out_dtype": torch.float16, "cast": "before_weight"},
)


@cache
def known_after_good_calls() -> dict[Any, Any]:
    """Return the plans of good calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "plans", {})
        for given in GOOD:
            normforge.layernorm2d_fwd(X, **given)
        for function, good in CALLS.values():
            for given in (good, good | {"wants": ("dx",)} if "wants" in good else {}):
                function(**good | given)
        for function, good in FOLLOWED.values():
            function(**good | {"x": good["x"].clone().requires_grad_()})
        return dispatch.plans


@pytest.mark.parametrize(
    ("like", "other", "says", "error"),
    [(like, *row, error) for like, table in REFUSED.items() for error, rows in table.items() for row in rows],
)
def test_refused(like: str, other: dict[str, Any], says: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike where nothing is known, by `which`, and after good calls, without a draw of random numbers."""
    function, good = (CALLS | MADE)[like]
    given, known, random = good | other, known_after_good_calls(), torch.get_rng_state()
    monkeypatch.setattr(dispatch, "plans", {})
    cold = refusal(function, given)
    assert cold[0] is getattr(errors, error)
    assert says in cold[1]
    assert refusal(WHICH.get(function, function), given) == cold
    monkeypatch.setattr(dispatch, "plans", known)
    assert refusal(function, given) == cold
    assert torch.equal(torch.get_rng_state(), random)


def test_norm_unknown() -> None:
    with pytest.raises(ConflictError, match=r"norm='batch' is no mode; it takes 'layer', 'rms'"):
        normforge.which(X, norm="batch")


def test_errors_are_also_what_python_would_raise() -> None:
    also = {
        ShapeError: ValueError,
        DTypeError: TypeError,
        DeviceError: RuntimeError,
        LayoutError: ValueError,
        ConflictError: ValueError,
    }
    assert all(issubclass(error, usual) and issubclass(error, ArgumentError) for error, usual in also.items())

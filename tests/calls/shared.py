"""What several files of this folder share: backward functions by norm, their oracle, and outputs that must be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from normforge import reference
from normforge.calls.outputs import NormGradients
from normforge.families.public import layernorm2d_bwd, rmsnorm2d_bwd
from normforge.selection import dispatch
from normforge.tools.compare import compare_gradients

BACKWARD: dict[str, Callable[..., NormGradients]] = {"layer": layernorm2d_bwd, "rms": rmsnorm2d_bwd}
BACKWARD_ORACLE: dict[str, Callable[..., reference.ReferenceGradients]] = {
    "layer": reference.layernorm2d_bwd,
    "rms": reference.rmsnorm2d_bwd,
}


def all_plans() -> list[Any]:
    """Return the plans of aligned calls of all known kinds, and those that kinds share, in the order they came in."""
    return [getattr(kind, "plan", kind) for kinds in dispatch.plans.values() for kind in reversed(kinds)]


def there(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return an output of a call, which must be there."""
    assert tensor is not None
    return tensor


def backward_operands(norm: str, m: int = 3, n: int = 64) -> dict[str, Any]:
    """Return random operands of a backward call, every one that a norm has."""
    given: dict[str, Any] = {name: torch.randn(m, n) for name in ("dy", "x", "dresidual_out")}
    given |= {"weight": torch.randn(n), "x_bias": torch.randn(n), "rstd": torch.rand(m) + 0.5}
    return given | ({"mean": torch.randn(m)} if norm == "layer" else {})


def check_backward(norm: str, **given: Any) -> NormGradients:
    """Run a backward call, hold every gradient against the oracle, and return them."""
    actual = BACKWARD[norm](**given)
    inputs = {name: value for name, value in given.items() if name not in ("dx_dtype", "bias_dtype", "wants")}
    wrong = [finding for finding in compare_gradients(actual, BACKWARD_ORACLE[norm](**inputs)) if not finding.ok]
    assert not wrong, wrong
    return actual


# By error and name: what is passed, and what the message begins with or holds.
Refused = Mapping[type[Exception], Mapping[str, tuple[dict[str, Any], str]]]


def each_of(refused: Refused) -> pytest.MarkDecorator:
    """Run a test for each call of a table: of what is passed, the error and its message."""
    rows = [
        pytest.param(given, error, message, id=name)
        for error, table in refused.items()
        for name, (given, message) in table.items()
    ]
    return pytest.mark.parametrize(("given", "error", "message"), rows)

"""The functional API by name, and what several tests ask of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge.calls.row_gradients import Backward
from normforge.selection import dispatch
from proving.cases import Case, cases

FUNCTIONS: dict[str, Callable[..., object]] = {
    "layer": normforge.layer_norm,
    "rms": normforge.rms_norm,
    "add_layer": normforge.add_layer_norm,
    "add_rms": normforge.add_rms_norm,
}

each_norm = pytest.mark.parametrize("norm", ["layer", "rms"])
each_add = pytest.mark.parametrize("norm", ["add_layer", "add_rms"])
each_function = pytest.mark.parametrize("norm", FUNCTIONS)


def plain(norm: str, *, x_bias: bool = False, **at: Any) -> Case:
    """Return the case of a function; a residual has x's dtype unless `at` has another."""
    without = (*(() if "add" in norm else ("residual",)), *(() if x_bias else ("x_bias",)))
    at = {"residual": at.get("dtype", torch.float32), **at}
    family = "added" if norm.endswith("_add") else "plain"
    (case,) = cases(family, vary=(), norm=norm.replace("add_", "").removesuffix("_add"), without=without, **at)
    return case


def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What is added to at each backward pass of rows in parts that is like none before: whether kernels computed it."""
    monkeypatch.setattr(dispatch, "plans", {})
    found: list[bool] = []
    takes = Backward.takes

    def noted(*given: Any) -> bool:
        found.append(takes(*given))
        return found[-1]

    monkeypatch.setattr(Backward, "takes", noted)
    return found


def backward(root: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """`root.backward(gradient)`, which has no types."""
    torch.autograd.backward([root], None if gradient is None else [gradient])

"""A model of one norm, jobs of it, and wrong forms of that norm, to try the benchmark of models with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.models.names import BF16, EAGER, STEPS
from benchmarks.models.specs import Shape, Spec
from benchmarks.models.table import Row, Table, load
from benchmarks.models.variants import VARIANTS, Variant
from benchmarks.models.worker import Job

from ...calling import there

CPU = torch.device("cpu")
HEADER = {"device": "a test", "revision": "none"}
INSTALL = "pip install -e '.[models]' has what this model is of"
TOY = Spec(
    "toy",
    "torch",
    Shape(1, 16, 1, 16, batch=4),
    lambda shape: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1)),
    lambda shape, device, dtype: (
        lambda model: model(torch.linspace(-1, 1, 64).view(4, 16).to(dtype)).float().square().mean()
    ),
)


def job_of(out: Path, model: str = TOY.name, **given: Any) -> Job:
    options: dict[str, Any] = {"dtype": BF16, "runs": (EAGER,), "variants": ("torch", "patch"), "rounds": 1} | given
    return Job(model, steps=STEPS, size="tiny", device="cpu", out=str(out), header=HEADER, **options)


def loaded(out: Path) -> Table:
    """The table that a folder has to hold."""
    return there(load(out))


def rows_of(out: Path) -> dict[str, Row]:
    """The rows of a table, by variant."""
    return {key.variant: row for key, row in loaded(out).rows.items()}


def add_variant(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], object]) -> None:
    def changed(model: nn.Module, spec: Spec) -> None:
        change(model)

    monkeypatch.setitem(VARIANTS, name, Variant(name, name, changed))


def of_norm(model: Any, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Let a toy's norm compute something else."""
    norm = model[1]
    norm.forward = partial(function, norm)


BROKEN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "scaled": lambda n, x: 1.05 * functional.layer_norm(x, (16,), n.weight, n.bias, n.eps),
    "no-bias": lambda n, x: functional.layer_norm(x, (16,), n.weight, None, n.eps),
    "no-gradient": lambda n, x: functional.layer_norm(x, (16,), n.weight, n.bias.detach(), n.eps),
    "half-gradient": lambda n, x: functional.layer_norm(x, (16,), (n.weight + n.weight.detach()) / 2, n.bias, n.eps),
    "rms": lambda n, x: functional.rms_norm(x, (16,), n.weight, n.eps) + n.bias,
    "epsilon": lambda n, x: functional.layer_norm(x, (16,), n.weight, n.bias, 0.1),
    "nan": lambda n, x: functional.layer_norm(x, (16,), n.weight, n.bias, n.eps) * float("nan"),
}

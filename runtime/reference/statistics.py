"""The oracle of statistics alone, in plain torch: outputs of a norm without y."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..codegen.values import Norm
from .norms import PLAIN, Oracle, ReferenceOutput


def _statistics(norm: Oracle, x: torch.Tensor, **options: Any) -> ReferenceOutput:
    nothing: Any = None
    return norm(x, save_mv=True, **options)._replace(y=nothing)


FORWARD: Mapping[Norm, Oracle] = {norm: partial(_statistics, oracle) for norm, oracle in PLAIN.items()}

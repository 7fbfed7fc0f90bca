"""Lets torchvision, which timm imports, be imported beside a build of torch that its operators are not built for."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

import torch

# PyPI's torchvision is built for PyPI's torch: beside a CPU build its library does not load, and its import then fails
# at the first operator that it describes. No model here calls these operators.
_UNDEFINED = ("nms", "qnms")


def _import_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return
    library: Any = torch.library  # Without types.
    for name in _UNDEFINED:
        library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    importlib.import_module("torchvision")


if find_spec("torchvision") is not None:
    _import_torchvision()

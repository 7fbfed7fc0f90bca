"""diffusers' transformers, UNets and autoencoders of `diffusion.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
import yaml

DIFFUSION: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def tiny(name: str) -> torch.nn.Module:
    """Return a model with random weights, in evaluation mode."""
    made: torch.nn.Module = getattr(diffusers, name)(**DIFFUSION[name]["sizes"])
    return made.eval()


def inputs(name: str) -> dict[str, Any]:
    """Return what the forward of a model takes."""
    model = DIFFUSION[name]
    found = {tensor: _random(shape) for tensor, shape in model["random"].items()}
    found |= {tensor: torch.tensor(values) for tensor, values in model.get("tensors", {}).items()}
    found |= model.get("others", {})
    return found


def _random(shape: list[Any]) -> Any:
    return torch.randn(shape) if isinstance(shape[0], int) else [torch.randn(each) for each in shape]

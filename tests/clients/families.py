"""Transformers' families of language models of `families.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

import normforge

from .alike import move

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FAMILIES: dict[str, dict[str, Any]] = {family: {} for family in _TABLE["alike"]} | _TABLE["others"]


def tiny(family: str) -> PretrainedConfig:
    """Return the small configuration of a family.

    Raises:
        KeyError: this release of transformers has no such family.
    """
    cls = CONFIG_MAPPING[family]
    known = set(vars(cls())) | set(dir(cls))
    sizes = {name: size for name, size in _TABLE["small"].items() if name in known} | FAMILIES[family]
    return cls(**{name: size for name, size in sizes.items() if size is not None})


def language_model(family: str, *, patched: bool = False) -> Any:
    """Return a small model of a family, always of the same random weights, in evaluation mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family)).float().eval()
    move(model)
    if patched:
        normforge.patch(model)
    return model

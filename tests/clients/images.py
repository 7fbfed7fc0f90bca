"""timm's architectures of `images.yaml`."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch

from proving.cases import with_tuples
from tests.calling import table_at


class Image(NamedTuple):
    """A model of timm's: its sizes, the side of an image, and the norms that `patch` reports.

    A model without a class is made by `timm.create_model`; a class is for names that fix their own sizes.
    """

    sizes: dict[str, Any]
    side: int = 32
    left: tuple[str, ...] = ()
    cls: str = ""


IMAGES = {
    name: Image(**row)
    for name, row in with_tuples(
        table_at(Path(__file__).with_suffix(".yaml"), {"timm": timm, "partial": partial})
    ).items()
}


def tiny(name: str) -> torch.nn.Module:
    """Return a model with random weights, in evaluation mode."""
    image = IMAGES[name]
    made: torch.nn.Module = (
        attrgetter(image.cls)(timm.models)(num_classes=8, **image.sizes)
        if image.cls
        else timm.create_model(name, pretrained=False, num_classes=8, **image.sizes)
    )
    return made.eval()

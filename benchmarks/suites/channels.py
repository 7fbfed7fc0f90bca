"""Norms over the channels of images: ConvNeXt's feature maps and those of VAEs, in both layouts."""

from __future__ import annotations

import math
from itertools import product

from ..cells import ChannelsCell, Method, Norm, Suite, Task

# ConvNeXt's four stages at a batch of training, and at a small one the first.
_CONVNEXT = ((128, 96, 56, 56), (128, 192, 28, 28), (128, 384, 14, 14), (128, 768, 7, 7), (8, 96, 56, 56))
# Feature maps of a decoder, and of a video's.
_VAE = ((1, 512, 256, 256), (1, 256, 512, 512), (1, 96, 17, 240, 416), (1, 384, 5, 60, 104))


def _cells(task: Task, part: str) -> list[ChannelsCell]:
    return [
        ChannelsCell(
            *(task, norm, shape[0], math.prod(shape[1:])),
            group=f"{part}, channels last" if last else part,
            shape=shape,
            channels_last=last,
        )
        for norm, last, shape in product(Norm, (False, True), (*_CONVNEXT, *_VAE))
    ]


SUITE = Suite(
    "channels",
    "Norms over channels",
    Method.COLD,
    (*_cells(Task.CHANNELS, "forward"), *_cells(Task.CHANNELS_BACKWARD, "backward")),
    sweeps=False,
)

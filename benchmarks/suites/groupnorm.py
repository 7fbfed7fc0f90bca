"""GroupNorm of 32 groups, as UNets and VAEs for diffusion have it, alone or with SiLU behind it, in both layouts."""

from __future__ import annotations

from itertools import product

from ..cells import GroupCell, Method, Suite, Task, cell_of

# Shapes of a UNet at 64 by 64, guided and so with two samples, at each resolution; and of one in training.
_UNET = ((2, 320, 64, 64), (2, 640, 32, 32), (2, 1280, 16, 16), (2, 1280, 8, 8), (16, 320, 64, 64))
# Shapes of a VAE's decoder, from the latent picture to its output, and of one for video.
_VAE = ((1, 512, 64, 64), (1, 512, 256, 256), (1, 256, 512, 512), (1, 128, 512, 512), (1, 128, 20, 256, 256))
_ALONE = (_UNET[0], _UNET[4], _VAE[3])
# Other dtypes: UNets run in fp16 and are trained in both, and SDXL's VAE, which overflows fp16, decodes in fp32.
_OTHERS: dict[str, tuple[tuple[int, ...], ...]] = {"fp16": (_UNET[0], _UNET[4]), "fp32": (_UNET[0], _VAE[1])}
_TRAINED = (_UNET[0], _UNET[2], _UNET[4], _VAE[1])


def _cells(task: Task, shapes: tuple[tuple[int, ...], ...], silu: bool = True, dtype: str = "bf16") -> list[GroupCell]:
    return [
        cell_of(task, shape, channels_last=last, silu=silu, dtype=dtype)
        for last, shape in product((False, True), shapes)
    ]


SUITE = Suite(
    "groupnorm",
    "GroupNorm",
    Method.COLD,
    (
        *_cells(Task.GROUP, (*_UNET, *_VAE)),
        *_cells(Task.GROUP, _ALONE, silu=False),
        *_cells(Task.GROUP_BACKWARD, _TRAINED),
        *(cell for dtype, shapes in _OTHERS.items() for cell in _cells(Task.GROUP, shapes, dtype=dtype)),
        *(cell for dtype in _OTHERS for cell in _cells(Task.GROUP_BACKWARD, (_UNET[4],), dtype=dtype)),
    ),
    sweeps=False,
)

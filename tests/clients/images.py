"""timm's architectures, each small enough for Triton's interpreter, with the norms that patch leaves alone."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import timm
import torch


class Image(NamedTuple):
    """A model of timm's: its sizes, the side of an image, and the norms that `patch` reports.

    A model without a class is made by `timm.create_model`; a class is for names that fix their own sizes.
    """

    sizes: dict[str, Any]
    side: int = 32
    left: frozenset[str] = frozenset()
    cls: str = ""


_PLAIN = {"embed_dim": 48, "depth": 2, "num_heads": 3}
_SMALL = _PLAIN | {"img_size": 32, "patch_size": 8}
_WINDOWS = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4)}
_MIXER = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_blocks": 2}
_STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
_EMBEDS = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4)}
_WIDE = {"img_size": 32, "embed_dim": (32, 32), "depths": (1, 1), "block_type": ("M", "M"), "stem_width": 8}
_CONVOLUTIONS = {
    "block": timm.models.resnet.BasicBlock,
    "layers": (1, 1, 1, 1),
    "channels": (8, 8, 16, 16),
    "norm_layer": partial(timm.layers.GroupNorm, num_groups=4),
}

IMAGES = {
    "vit_tiny_patch16_224": Image(_SMALL),
    "vit_small_patch16_dinov3": Image(_PLAIN | {"img_size": 32}),
    "deit3_small_patch16_224": Image(_SMALL),
    "beit_base_patch16_224": Image(_SMALL),
    "eva02_tiny_patch14_224": Image(_PLAIN | {"img_size": 28}, side=28),
    "aimv2_large_patch14_224": Image(_PLAIN | {"img_size": 28}, side=28),
    "cait_xxs24_224": Image(_SMALL),
    "xcit_nano_12_p16_224": Image(_PLAIN | {"img_size": 32}),
    "mixer": Image(_MIXER, cls="mlp_mixer.MlpMixer"),
    "swin_tiny_patch4_window7_224": Image(_WINDOWS),
    "swinv2_tiny_window8_256": Image(_WINDOWS),
    "convnext_tiny": Image(_STAGES),
    "convnextv2_tiny": Image(_STAGES, left=frozenset({"GlobalResponseNorm"})),
    "edgenext_xx_small": Image({}),
    "maxvit_pico_rw_256": Image(_WIDE, left=frozenset({"BatchNormAct2d"})),
    "pvt_v2": Image(_EMBEDS, cls="pvt_v2.PyramidVisionTransformerV2"),
    "twins_svt_small": Image(_EMBEDS | {"img_size": 32}),
    "davit_tiny": Image(_EMBEDS),
    "hiera_tiny_224": Image({"img_size": (32, 32), "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 1, 1)}),
    "poolformer": Image(
        _STAGES | {"norm_layers": timm.layers.GroupNorm1, "downsample_norm": None},
        cls="metaformer.MetaFormer",
    ),
    "resnet_gn": Image(_CONVOLUTIONS, side=33, cls="resnet.ResNet"),
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

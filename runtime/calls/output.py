"""What forward and backward calls return."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerNormOutput(NamedTuple):
    """Outputs of a forward call; None where one was not asked for.

    Attributes:
        y: x's shape, in out_dtype.
        residual_out: x's shape, in residual's dtype: x + x_bias + residual, rounded once.
        y_scale: x's shape without the last dimension, in scale_dtype; y * y_scale undoes the quantisation.
        mean: x's shape without the last dimension, fp32; LayerNorm only.
        rstd: x's shape without the last dimension, fp32.
    """

    y: torch.Tensor
    residual_out: torch.Tensor | None
    y_scale: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None


class NormGradients(NamedTuple):
    """What a backward call returns; None where a gradient was not asked for.

    Attributes:
        dx: x's shape; also the gradient of a residual that was added to x.
        dweight: (N,), in weight's dtype.
        dbias: (N,); LayerNorm only.
        dx_bias: (N,), in x_bias's dtype.
    """

    dx: torch.Tensor | None
    dweight: torch.Tensor | None
    dbias: torch.Tensor | None
    dx_bias: torch.Tensor | None

"""What a backward call was given, checked."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ..codegen.model import Cast, Direction, FusedAdd, Mode, Norm
from ..dtypes import DTYPES, FLOATS
from ..errors import ConflictError, DTypeError, LayoutError, ShapeError
from ..mode_words import word
from .arguments import check_device, check_no_gradient, check_number, check_offset, check_rows, check_vector, check_x


@dataclass(frozen=True)
class GradientCall:
    """A checked backward call; see `layernorm2d_bwd` for its arguments.

    Attributes:
        packed: whether rstd holds the means too, if there are any, as `outputs` has them, and mean is None.
    """

    norm: Norm
    m: int
    n: int
    dy: torch.Tensor | None
    x: torch.Tensor
    weight: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    packed: bool
    weight_offset: float
    x_bias: torch.Tensor | None
    dresidual_out: torch.Tensor | None
    cast: Cast
    dx_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    wants: tuple[str, ...]

    @property
    def mode(self) -> Mode:
        """The mode of the kernels that serve it."""
        fadd = FusedAdd.NONE if self.dresidual_out is None else FusedAdd.PRE_ADD_STORE
        y = self.x if self.dy is None else self.dy
        cast = self.cast.of(DTYPES[y.dtype], DTYPES[self.x.dtype])
        return mode_of(self.norm, self.x, self.x_bias is not None, fadd, cast)


def mode_of(norm: Norm, x: torch.Tensor, x_bias: bool, fadd: FusedAdd, cast: Cast) -> Mode:
    """The mode of a backward call; fadd says whether the stored sum has a gradient."""
    dtype = DTYPES[x.dtype]
    return Mode(norm, dtype, dtype, fadd, x_bias=x_bias, direction=Direction.BACKWARD, cast=cast)


_WANTS = {Norm.LAYER: ("dx", "dweight", "dbias", "dx_bias"), Norm.RMS: ("dx", "dweight", "dx_bias")}


def check(
    norm: Norm,
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    packed: bool,
    weight_offset: float,
    x_bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    cast: str | Cast,
    dx_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    wants: Collection[str],
) -> GradientCall:
    """Check everything a backward call was given, but for packed statistics, which no caller makes."""
    n = check_x(x)
    offset = check_number("weight_offset", weight_offset, least=-math.inf)
    check_offset(weight, offset)
    statistics = {"mean": mean, "rstd": rstd} if norm.centres else {"rstd": rstd}
    dtypes = {"dx_dtype": dx_dtype, "bias_dtype": bias_dtype}
    for name, rows in (("dy", dy), ("dresidual_out", dresidual_out)):
        if rows is not None:
            check_rows(name, rows, x, FLOATS)
    for name, vector in (("weight", weight), ("x_bias", x_bias)):
        if vector is not None:
            check_vector(name, vector, x)
    for name, statistic in () if packed else statistics.items():
        _check_statistic(name, statistic, x)
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in FLOATS:
            raise DTypeError(f"{name} is {dtype!r}; it takes {' or '.join(map(str, FLOATS))}")
    for name in wants:
        if name not in _WANTS[norm]:
            raise ConflictError(f"wants has {name!r}; it takes some of {', '.join(_WANTS[norm])}")
    for name, tensor in (("weight", weight), ("x_bias", x_bias)):
        if f"d{name}" in wants and tensor is None:
            raise ConflictError(f"wants has 'd{name}' and no {name} was passed; pass it, or leave 'd{name}' out")
    return GradientCall(
        norm=norm,
        m=x.numel() // n,
        n=n,
        dy=dy,
        x=x,
        weight=weight,
        mean=mean,
        rstd=rstd,
        packed=packed,
        weight_offset=offset,
        x_bias=x_bias,
        dresidual_out=dresidual_out,
        cast=word(Cast, "cast", cast),
        dx_dtype=dx_dtype,
        bias_dtype=bias_dtype,
        wants=tuple(wants),
    )


def refuse_gradient(call: GradientCall) -> None:
    """Refuse a backward call whose gradients ought to have one themselves, and will not.

    Raises:
        GradientError: a tensor requires a gradient, and gradients are enabled.
    """
    check_no_gradient(
        "no kernel computes a gradient's gradient",
        dy=call.dy,
        x=call.x,
        weight=call.weight,
        mean=call.mean,
        rstd=call.rstd,
        x_bias=call.x_bias,
        dresidual_out=call.dresidual_out,
    )


def _check_statistic(name: str, statistic: torch.Tensor | None, x: torch.Tensor) -> None:
    if not isinstance(statistic, torch.Tensor) or statistic.dtype != torch.float32:
        got = statistic.dtype if isinstance(statistic, torch.Tensor) else type(statistic).__name__
        raise DTypeError(f"{name} is {got}; it takes the torch.float32 tensor that the forward call saved")
    if statistic.shape != x.shape[:-1]:
        raise ShapeError(f"{name} has shape {tuple(statistic.shape)}; it takes one value a row, {tuple(x.shape[:-1])}")
    check_device(name, statistic, x)
    if not statistic.is_contiguous():
        raise LayoutError(f"{name} has strides {statistic.stride()}; pass {name}.contiguous()")

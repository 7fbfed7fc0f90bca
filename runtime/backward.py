"""Gradients of LayerNorm and RMSNorm: a persistent kernel that leaves partial sums, and one that adds them up.

Formulas: with h the normalised row and g = dy * weight, LayerNorm has
dx = (g - h * mean(g * h) - mean(g)) * rstd, RMSNorm the same without mean(g); dweight and dbias are sums of dy * h and
dy over rows (Ba et al., 2016; Triton's layer-norm tutorial derives them).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch

from . import dispatch
from .arguments import check_device, check_rows, check_vector, check_x, row_stride
from .codegen.model import Direction, FusedAdd, Mode, Norm, Part, Pipeline
from .codegen.tiling import WARP
from .dtypes import DTYPES, FLOATS
from .errors import ConflictError, DTypeError, LayoutError, ShapeError
from .kernels import launch, require_device
from .output import NormGradients
from .table import Entry

# What decides how many programs a multiprocessor holds at once: its registers, and what a program keeps in them (x and
# dy of two rows in 16 bits, two sums in 32, and addresses and temporaries of each thread).
_REGISTERS_A_MULTIPROCESSOR = 65536
_REGISTERS_A_VALUE = 4
_REGISTERS_A_THREAD = 40
_MOST_PROGRAMS_A_MULTIPROCESSOR = 8

# The interpreter has none; one stands for few programs, so that a handful of rows makes each take several in turn.
_INTERPRETED_MULTIPROCESSORS = 1

# Of partial sums: rows at a time and columns a program, 16 values a thread on 4 warps.
_FINAL_ROWS, _FINAL_BLOCK, _FINAL_WARPS = 16, 128, 4


def layernorm2d_bwd(
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x_bias: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    wants: Collection[str] = ("dx",),
) -> NormGradients:
    """Compute the gradients of `layernorm2d_fwd`; two calls of the same arguments return the same bits.

    Args:
        dy: (..., N), fp16, bf16 or fp32: the gradient of y; None counts as zero.
        x: dy's shape, likewise: what was normalised. After a fused add that is residual_out.
        weight: (N,), or None where the forward call had none.
        mean: x's shape without the last dimension, fp32, as the forward call saved it.
        rstd: likewise.
        x_bias: (N,), if the forward call added one to x; leave it out where x is residual_out.
        dresidual_out: x's shape: the gradient of residual_out, added to dx before it is rounded.
        dx_dtype: dx's dtype; None is x's.
        bias_dtype: dbias's dtype; None is weight's, or x's without a weight.
        wants: which of "dx", "dweight", "dbias" and "dx_bias" to compute; nothing else is.

    Returns:
        `NormGradients`. dy is never written to.

    Raises:
        NormforgeError: as `layernorm2d_fwd` does for its arguments.
    """
    return _backward(
        Norm.LAYER,
        dy,
        x,
        weight,
        mean=mean,
        rstd=rstd,
        weight_offset=0.0,
        x_bias=x_bias,
        dresidual_out=dresidual_out,
        dx_dtype=dx_dtype,
        bias_dtype=bias_dtype,
        wants=wants,
    )


def rmsnorm2d_bwd(
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    rstd: torch.Tensor,
    weight_offset: float = 0.0,
    x_bias: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
    wants: Collection[str] = ("dx",),
) -> NormGradients:
    """Compute the gradients of `rmsnorm2d_fwd`; see `layernorm2d_bwd` for the arguments."""
    return _backward(
        Norm.RMS,
        dy,
        x,
        weight,
        mean=None,
        rstd=rstd,
        weight_offset=weight_offset,
        x_bias=x_bias,
        dresidual_out=dresidual_out,
        dx_dtype=dx_dtype,
        bias_dtype=None,
        wants=wants,
    )


def _backward(
    norm: Norm,
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    x_bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    dx_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    wants: Collection[str],
) -> NormGradients:
    statistics = {"rstd": rstd} if mean is None else {"mean": mean, "rstd": rstd}
    dtypes = {"dx_dtype": dx_dtype, "bias_dtype": bias_dtype}
    n = _check(norm, dy, x, weight, statistics, x_bias, dresidual_out, dtypes, wants)
    require_device(x)
    m = x.numel() // n
    gradients = NormGradients(
        dx=torch.empty(x.shape, dtype=dx_dtype or x.dtype, device=x.device) if "dx" in wants else None,
        dweight=torch.empty_like(weight) if "dweight" in wants and weight is not None else None,
        dbias=_vector(x, bias_dtype or (x if weight is None else weight).dtype) if "dbias" in wants else None,
        dx_bias=torch.empty_like(x_bias) if "dx_bias" in wants and x_bias is not None else None,
    )
    if m == 0:
        for vector in gradients[1:]:
            if vector is not None:
                vector.zero_()
        return gradients
    fadd = FusedAdd.NONE if dresidual_out is None else FusedAdd.PRE_ADD_STORE
    entry = dispatch.find(mode_of(norm, x, x_bias is not None, fadd), n)
    programs = _programs(entry, m, n, x.device)
    if dy is None:
        # A row of stride 0 stands for all rows of zeros.
        dy = torch.zeros(n, dtype=x.dtype, device=x.device).expand(x.shape)
    values: dict[str, object] = {
        "dy_ptr": dy,
        "x_ptr": x,
        "x_bias_ptr": x_bias,
        "weight_ptr": weight,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "dresidual_out_ptr": dresidual_out,
        "dx_ptr": gradients.dx,
        "dy_row_stride": row_stride("dy", dy),
        "x_row_stride": row_stride("x", x),
        "dresidual_out_row_stride": 0 if dresidual_out is None else row_stride("dresidual_out", dresidual_out),
        "dx_row_stride": n,
        "M": m,
        "weight_offset": weight_offset,
        "N": n,
        "ROWS": entry.rows,
        "BLOCK": entry.block,
    }
    sums = {name: getattr(gradients, name) for name in ("dweight", "dbias", "dx_bias")}
    partials = {
        name: None if gradient is None else torch.empty(programs, n, dtype=torch.float32, device=x.device)
        for name, gradient in sums.items()
    }
    values |= {f"{name}_ptr": partial for name, partial in partials.items()}
    _reduce_rows(entry, m, n, programs, values, x)
    if any(gradient is not None for gradient in sums.values()):
        _add_up(entry, programs, n, partials, sums, x)
    return gradients


def mode_of(norm: Norm, x: torch.Tensor, x_bias: bool, fadd: FusedAdd) -> Mode:
    """The mode of a backward call; fadd says whether the stored sum has a gradient."""
    dtype = DTYPES[x.dtype]
    return Mode(norm, dtype, dtype, fadd, x_bias=x_bias, direction=Direction.BACKWARD)


def _reduce_rows(entry: Entry, m: int, n: int, programs: int, values: dict[str, object], x: torch.Tensor) -> None:
    kernel = entry.load()
    if entry.pipeline != Pipeline.TWO_PASS.value:
        launch(kernel, (programs,), values, entry.warps, x)
        return
    values |= {name: torch.empty(m, dtype=torch.float32, device=x.device) for name in ("gh_mean_ptr", "g_mean_ptr")}
    # A thread holds as many values of one row as it does of a tile of several.
    launch(entry.load(Part.ROW_TERMS), (m,), values | {"BLOCK": entry.rows * entry.block}, entry.warps, x)
    launch(kernel, (-(-n // entry.block), programs), values, entry.warps, x)


def _add_up(
    entry: Entry,
    programs: int,
    n: int,
    partials: dict[str, torch.Tensor | None],
    sums: dict[str, torch.Tensor | None],
    x: torch.Tensor,
) -> None:
    values: dict[str, object] = {"programs": programs, "N": n, "ROWS": _FINAL_ROWS, "BLOCK": _FINAL_BLOCK}
    values |= {f"{name}_partials_ptr": partial for name, partial in partials.items()}
    values |= {f"{name}_ptr": gradient for name, gradient in sums.items()}
    launch(entry.load_finaliser(), (-(-n // _FINAL_BLOCK),), values, _FINAL_WARPS, x)


def _programs(entry: Entry, m: int, n: int, device: torch.device) -> int:
    """Programs to share the rows: a function of the device and N, and no more than there are tiles of rows."""
    values = entry.rows * min(n, entry.block) if entry.pipeline != Pipeline.ONE_PASS.value else n
    registers = _REGISTERS_A_VALUE * values + _REGISTERS_A_THREAD * WARP * entry.warps
    resident = min(max(1, _REGISTERS_A_MULTIPROCESSOR // registers), _MOST_PROGRAMS_A_MULTIPROCESSOR)
    most = _multiprocessors(device) * resident
    if entry.pipeline == Pipeline.TWO_PASS.value:
        # Blocks of columns fill the device already; each further program leaves a row of partial sums.
        most = -(-most // -(-n // entry.block))
    return min(most, -(-m // entry.rows))


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _vector(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape[-1], dtype=dtype, device=x.device)


_WANTS = {Norm.LAYER: ("dx", "dweight", "dbias", "dx_bias"), Norm.RMS: ("dx", "dweight", "dx_bias")}


def _check(
    norm: Norm,
    dy: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: dict[str, torch.Tensor],
    x_bias: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    dtypes: dict[str, torch.dtype | None],
    wants: Collection[str],
) -> int:
    n = check_x(x)
    for name, rows in (("dy", dy), ("dresidual_out", dresidual_out)):
        if rows is not None:
            check_rows(name, rows, x, FLOATS)
    for name, vector in (("weight", weight), ("x_bias", x_bias)):
        if vector is not None:
            check_vector(name, vector, x)
    for name, statistic in statistics.items():
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
    return n


def _check_statistic(name: str, statistic: torch.Tensor, x: torch.Tensor) -> None:
    if not isinstance(statistic, torch.Tensor) or statistic.dtype != torch.float32:
        got = statistic.dtype if isinstance(statistic, torch.Tensor) else type(statistic).__name__
        raise DTypeError(f"{name} is {got}; it takes the torch.float32 tensor that the forward call saved")
    if statistic.shape != x.shape[:-1]:
        raise ShapeError(f"{name} has shape {tuple(statistic.shape)}; it takes one value a row, {tuple(x.shape[:-1])}")
    check_device(name, statistic, x)
    if not statistic.is_contiguous():
        raise LayoutError(f"{name} has strides {statistic.stride()}; pass {name}.contiguous()")

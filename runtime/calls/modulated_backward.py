"""The backward pass of modulated norms by kernels: the gradients of rows, and what each sample's rows add up to.

Within a sample the scale is one: with h the normalised rows, `sum(dy * h)` and `sum(dy)` over its rows are all that the
gradients of scale, shift, weight and bias are made of, by operations on a row a sample. Programs each take rows of one
sample and leave sums of their own, which are added up in a fixed order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ..codegen.model import Mode
from ..codegen.values import Direction, FusedAdd, Norm
from ..dtypes import DTYPES
from ..upstream.torch_dynamo import eager_only
from .canonical import in_place_of
from .modulated_instead import Kept, Told
from .outputs import dtype_of_all
from .row_gradients import Kind, Tensors, in_memory, kind_of, plan_of, shared_sum, sum_dtype
from .row_layout import row_stride

# Of fewer rows than that a sample, programs would leave about as much as they read.
LEAST_ROWS = 8
# Each has a program or more, and the second dimension of a grid takes 65535.
MOST_SAMPLES = 2**15

# Sums are sum(dy * h), sum(dy) and the gate's gradient.
TENSORS = Tensors(
    names=("dy", "x", "weight", "scale", "gate", "gated", "mean", "rstd", "dresidual_out", "dx", "dgated"),
    with_rows=("dy", "x", "scale", "gate", "gated", "dresidual_out", "dx", "dgated"),
    read=("dy", "x", "gated", "dresidual_out"),
    sums=("dweight", "dbias", "dgate"),
    shared="sample_rows",
)


def mode_of(norm: Norm, dtype: torch.dtype, adds: bool, gates: bool) -> Mode:
    """The mode of the kernels for rows of a type, with a gradient of the sum or not, gated or not."""
    fadd = FusedAdd.PRE_ADD_STORE if adds else FusedAdd.NONE
    own = DTYPES[dtype]
    return Mode(norm, own, own, fadd, direction=Direction.BACKWARD, modulated=True, x_gate=gates)


def stand_in(
    mode: Mode,
    n: int,
    own: torch.dtype,
    dtypes: Mapping[str, torch.dtype | None],
    misaligned: Collection[str],
) -> Kind:
    """What launches are alike in whose rows adjoin, whose tensors are of a type of their own, and that sum all."""
    single = torch.float32
    found = {
        **dict.fromkeys(TENSORS.names, own),
        "mean": single if mode.norm.centres else None,
        "rstd": single,
        **dtypes,
    }
    for name, there in (("gate", mode.x_gate), ("gated", mode.x_gate), ("dresidual_out", mode.fadd.stores)):
        found[name] = own if there else None
    found["dgated"] = found["gated"]
    # Without a weight, sums are the gradients of what samples have.
    summed = single if found["weight"] is not None else own
    left = {"dweight": summed, "dbias": summed, "dgate": own if mode.x_gate else None}
    strides = tuple([0 if found[name] is None else n for name in TENSORS.with_rows])
    types = (*[found[name] for name in TENSORS.names], *[left[name] for name in TENSORS.sums])
    return Kind(mode, TENSORS, n, types, strides, frozenset(misaligned))


def rows_a_sample(kept: Kept) -> int:
    """How many rows share a row of every modulation: those of a sample, or all."""
    rows = kept.rows
    m = rows.numel() // rows.shape[-1]
    least = m
    for operand in (kept.scale, kept.shift, kept.gate):
        if operand is not None and operand.dim() > 1:
            least = min(least, 1 if operand.shape == rows.shape else m // operand.shape[0])
    return least


def takes(kept: Kept, *arrived: torch.Tensor | None) -> bool:
    """Whether kernels compute the gradients of a call: of tensors in memory, and of several rows a sample."""
    if not in_memory((*kept, *arrived)) or kept.rows.numel() == 0:
        return False
    each = rows_a_sample(kept)
    return each >= LEAST_ROWS and kept.rows.numel() // kept.rows.shape[-1] // each <= MOST_SAMPLES


@eager_only
def gradients(
    kept: Kept, told: Told, dy: torch.Tensor, dresidual_out: torch.Tensor | None, due: Sequence[bool]
) -> list[torch.Tensor | None]:
    """What `modulated_instead.gradients` returns of the same arguments, where `takes` has passed them."""
    for_x, *_, for_residual, _, _ = due
    rows, n = kept.rows, kept.rows.shape[-1]
    m = rows.numel() // n
    samples = m // rows_a_sample(kept)
    x_dtype, *_, residual_dtype, _, _ = told.dtypes
    gates = kept.gate is not None
    of_sum = [(x_dtype, for_x and not gates), (residual_dtype, for_residual)]
    summed = [dtype for dtype, needed in of_sum if needed and dtype is not None]
    tensors: dict[str, torch.Tensor | None] = {
        "dy": _on_one_stride(dy),
        "x": _on_one_stride(rows),
        "weight": kept.weight,
        "scale": _of_samples(kept.scale, samples),
        "gate": None if kept.gate is None else _of_samples(kept.gate, samples),
        "gated": None if kept.gated is None else _on_one_stride(kept.gated),
        "mean": kept.mean,
        "rstd": kept.rstd,
        "dresidual_out": None if dresidual_out is None else _on_one_stride(dresidual_out),
        "dx": rows.new_empty(rows.shape, dtype=dtype_of_all(summed)) if summed else None,
        "dgated": rows.new_empty(rows.shape, dtype=x_dtype) if gates and for_x else None,
    }
    tensors = in_place_of(tensors, n, TENSORS.with_rows)
    strides = {name: _stride(tensors[name], samples if name in ("scale", "gate") else m) for name in TENSORS.with_rows}
    mode = mode_of(Norm(told.norm), rows.dtype, dresidual_out is not None, gates)
    plan = plan_of(kind_of(mode, TENSORS, n, tensors, strides, _sums(kept, samples, due)), rows.device)
    totals = plan.launch(m, samples, m // samples, tensors, told.weight_offset)
    found = _of_samples_sums(kept, told, totals, due)
    found[0] = tensors["dgated"] if gates else tensors["dx"]
    found[4] = tensors["dx"]
    return [
        gradient.to(dtype) if needed and gradient is not None and dtype is not None else None
        for gradient, dtype, needed in zip(found, told.dtypes, due, strict=True)
    ]


def _sums(kept: Kept, samples: int, due: Sequence[bool]) -> dict[str, torch.dtype]:
    """Which sums are needed, and in which type: the gradient's that one is, or fp32 if there is more to be done."""
    _, for_scale, for_shift, for_gate, _, for_weight, for_bias = due
    affine = kept.weight is not None or kept.bias is not None
    found = {}
    if for_scale or for_weight:
        found["dweight"] = torch.float32 if affine else sum_dtype(kept.scale, samples)
    if for_shift or for_bias or (for_scale and kept.bias is not None):
        found["dbias"] = torch.float32 if affine else sum_dtype(kept.shift, samples)
    if for_gate and kept.gate is not None:
        found["dgate"] = sum_dtype(kept.gate, samples)
    return found


def _of_samples_sums(
    kept: Kept, told: Told, totals: Mapping[str, torch.Tensor], due: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of what samples or all rows share, from what each sample's rows add up to: `_sums`."""
    _, for_scale, for_shift, for_gate, _, for_weight, for_bias = due
    found: list[torch.Tensor | None] = [None] * len(due)
    dy_h, dy = totals.get("dweight"), totals.get("dbias")
    if for_scale and dy_h is not None:
        dscale = dy_h if kept.weight is None else dy_h * (kept.weight.float() + told.weight_offset)
        if kept.bias is not None and dy is not None:
            dscale = dscale + dy * kept.bias.float()
        found[1] = shared_sum(dscale, kept.scale)
    if for_shift and dy is not None:
        found[2] = shared_sum(dy, kept.shift)
    if for_gate and kept.gate is not None:
        found[3] = shared_sum(totals["dgate"], kept.gate)
    if for_weight and dy_h is not None:
        found[5] = (dy_h * (1 + kept.scale.float())).sum(0)
    if for_bias and dy is not None:
        found[6] = (dy * (1 + kept.scale.float())).sum(0)
    return found


def _of_samples(operand: torch.Tensor, samples: int) -> torch.Tensor:
    return operand.expand(samples, -1) if operand.dim() == 1 else operand


def _on_one_stride(rows: torch.Tensor) -> torch.Tensor:
    # A sample's rows start at a multiple of it.
    return rows if rows.stride(-1) == 1 and isinstance(row_stride("rows", rows), int) else rows.contiguous()


def _stride(tensor: torch.Tensor | None, count: int) -> int:
    if tensor is None:
        return 0
    stride = row_stride("rows", tensor) if count > 1 else tensor.shape[-1]
    assert isinstance(stride, int)
    return stride

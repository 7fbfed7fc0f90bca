"""The backward pass of modulated norms by kernels: the gradients of rows, and what each sample's rows add up to.

Within a sample the scale is one: with h the normalised rows, `sum(dy * h)` and `sum(dy)` over its rows are all that the
gradients of scale, shift, weight and bias are made of, by operations on a row a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..call_kinds import LEAST_ROWS_OF_SAMPLE, MOST_SAMPLES
from ..codegen.model import Mode
from ..codegen.parameters import MODULATED_BWD
from ..codegen.values import Direction, FusedAdd, Norm
from ..dtypes import DTYPES
from ..selection import dispatch
from ..upstream.torch_dynamo import eager_only
from .eager import ModulatedArgs as Told
from .eager import ModulatedSaved as Kept
from .known_backward import Gradients, Learnt, looked_up_again
from .outputs import dtype_of_all
from .row_gradients import Backward, in_memory, launched, learn, rounded, shared_sum, sum_dtype
from .row_layout import row_stride, walkable

# What `Kept` holds, but for statistics, as kernels name it.
BACKWARD = Backward.of(MODULATED_BWD, ("x", "scale", "shift", "gate", "gated", "weight", "bias"))


def mode_of(norm: Norm, dtype: torch.dtype, adds: bool, gates: bool) -> Mode:
    """The mode of the kernels for rows of a type, with a gradient of the sum or not, gated or not."""
    fadd = FusedAdd.PRE_ADD_STORE if adds else FusedAdd.NONE
    own = DTYPES[dtype]
    return Mode(norm, own, own, fadd, direction=Direction.BACKWARD, modulated=True, x_gate=gates)


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
    return each >= LEAST_ROWS_OF_SAMPLE and kept.rows.numel() // kept.rows.shape[-1] // each <= MOST_SAMPLES


@eager_only
def gradients(
    kept: Kept,
    told: Told,
    dy: torch.Tensor | None,
    dresidual_out: torch.Tensor | None,
    due: Sequence[bool],
    learnt: Learnt | None = None,
) -> Gradients:
    """What `eager.modulated_gradients` returns of the same arguments, where `takes` has passed them.

    Args:
        kept: what the forward pass kept.
        told: see `eager.modulated_gradients`.
        dy: the gradient of y.
        dresidual_out: that of the sum; None if none arrived.
        due: which gradients are.
        learnt: the key and tensors of `gradients_known`, by which calls like this one become known; None has them
            stay unknown.
    """
    # Of another table, which may be loaded meanwhile, nothing is to be known.
    plans = dispatch.plans
    for_x, *_, for_residual, _, _ = due
    dy, dresidual_out = _on_one_stride(dy), _on_one_stride(dresidual_out)
    learnt, known = looked_up_again("modulated", learnt, told, due, dy, dresidual_out)
    if known is not None:
        return known
    rows, gates = kept.rows, kept.gate is not None
    samples = rows.numel() // rows.shape[-1] // rows_a_sample(kept)
    x_dtype, *_, residual_dtype, _, _ = told.dtypes
    of_sum = [(x_dtype, for_x and not gates), (residual_dtype, for_residual)]
    summed = [dtype for dtype, needed in of_sum if needed and dtype is not None]
    inputs: dict[str, torch.Tensor | None] = {
        "dy": dy,
        "x": _on_one_stride(rows),
        "weight": kept.weight,
        "scale": _of_samples(kept.scale, samples),
        "gate": None if kept.gate is None else _of_samples(kept.gate, samples),
        "gated": _on_one_stride(kept.gated),
        "mean": kept.mean,
        "rstd": kept.rstd,
        "dresidual_out": dresidual_out,
    }
    dtypes = _sums(kept, samples, due)
    if summed:
        dtypes["dx"] = dtype_of_all(summed)
    if gates and for_x and x_dtype is not None:
        dtypes["dgated"] = x_dtype
    operands = {"dgate": kept.gate}
    if not _is_affine(kept):
        operands |= {"dweight": kept.scale, "dbias": kept.shift}
    mode = mode_of(Norm(told.norm), rows.dtype, dresidual_out is not None, gates)
    done = launched(BACKWARD, mode, samples, inputs, dtypes, operands, rows.shape, told.weight_offset, learnt)
    results = done.named()
    found = _of_samples_sums(kept, told, results, due)
    found[0] = results.get("dgated" if gates else "dx")
    found[4] = results.get("dx")
    made = rounded(found, told.dtypes, due)
    learn(plans, learnt, done, made)
    return made


def _sums(kept: Kept, samples: int, due: Sequence[bool]) -> dict[str, torch.dtype]:
    """Which sums are needed, and in which type: the gradient's that one is, or fp32 if there is more to be done."""
    _, for_scale, for_shift, for_gate, _, for_weight, for_bias = due
    affine = _is_affine(kept)
    found = {}
    if for_scale or for_weight:
        found["dweight"] = torch.float32 if affine else sum_dtype(kept.scale, samples)
    if for_shift or for_bias or (for_scale and kept.bias is not None):
        found["dbias"] = torch.float32 if affine else sum_dtype(kept.shift, samples)
    if for_gate and kept.gate is not None:
        found["dgate"] = sum_dtype(kept.gate, samples)
    return found


def _is_affine(kept: Kept) -> bool:
    return kept.weight is not None or kept.bias is not None


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


def _on_one_stride(rows: torch.Tensor | None) -> torch.Tensor | None:
    if rows is None:
        return None
    rows = walkable(rows)
    # A sample's rows start at a multiple of it.
    return rows if isinstance(row_stride("rows", rows), int) else rows.contiguous()

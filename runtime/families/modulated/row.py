"""Calls of modulated norms: the row of the family; `calls/road.py` and `calls/row_gradients.py` have the rest.

Within a sample the scale is one: with h the normalised rows, `sum(dy * h)` and `sum(dy)` over its rows are all that the
gradients of scale, shift, weight and bias are made of, by operations on a row a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...call_kinds import LEAST_ROWS_OF_SAMPLE, MOST_SAMPLES
from ...calls import native, road
from ...calls.outputs import LayerNormOutput, dtype_of_all
from ...calls.record import BackwardPass, Recording
from ...calls.road import Outs, calls_of, launch_recorded
from ...calls.row_gradients import Backward, Problem, shared_sum, sum_dtype
from ...calls.row_layout import row_stride, walkable
from ...calls.traced import is_dynamo_compiling
from ...codegen.model import Mode
from ...codegen.parameters import MODULATED, MODULATED_BWD
from ...codegen.values import Direction, FusedAdd, Norm
from ...dtypes import DTYPES
from ...errors import ConflictError
from .. import eager
from ..operands import ModulatedArgs, ModulatedOperands, ModulatedOptions, ModulatedSaved
from ..plain_calls import handed_on, is_handed_on, normalise_family


def _saved(operands: ModulatedOperands, total: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return what was normalised (x, or residual_out, which the caller holds anyway), small operands, and a gated x."""
    x, scale, shift, gate, _, weight, bias = operands
    return x if total is None else total, scale, shift, gate, weight, bias, None if gate is None else x


def check_gate(operands: ModulatedOperands) -> None:
    """Refuse a gate of rows that nothing is added to.

    Raises:
        ConflictError: there is a gate and no residual.
    """
    _, _, _, gate, residual, _, _ = operands
    if gate is not None and residual is None:
        raise ConflictError("gate scales x before residual is added to it, and none was passed; pass residual")


def forward(operands: ModulatedOperands, options: ModulatedOptions, outs: Outs) -> LayerNormOutput:
    """Run a call of `modulated_layernorm2d_fwd` or `modulated_rmsnorm2d_fwd`."""
    check_gate(operands)
    result: LayerNormOutput = road.launched_2d(CALLS, operands, road.options_2d(operands, options), outs)
    return result


def mode_of(norm: Norm, dtype: torch.dtype, adds: bool, gates: bool) -> Mode:
    """Return the mode of the backward kernels for rows of a dtype."""
    fadd = FusedAdd.PRE_ADD_STORE if adds else FusedAdd.NONE
    own = DTYPES[dtype]
    return Mode(norm, own, own, fadd, direction=Direction.BACKWARD, modulated=True, x_gate=gates)


def rows_a_sample(kept: ModulatedSaved) -> int:
    """Return how many rows share a row of every modulation: the rows of a sample, or all rows."""
    rows = kept.x
    m = rows.numel() // rows.shape[-1]
    least = m
    for operand in (kept.scale, kept.shift, kept.gate):
        if operand is not None and operand.dim() > 1:
            least = min(least, 1 if operand.shape == rows.shape else m // operand.shape[0])
    return least


def _serves(kept: ModulatedSaved) -> bool:
    """Return True if there are several rows per sample, and not too many samples."""
    each = rows_a_sample(kept)
    return each >= LEAST_ROWS_OF_SAMPLE and kept.x.numel() // kept.x.shape[-1] // each <= MOST_SAMPLES


def _problem(call: BackwardPass) -> Problem:
    kept: ModulatedSaved
    kept, args, dy, dresidual_out, due, *_ = call
    for_x, *_, for_residual, _, _ = due
    rows, gates = kept.x, kept.gate is not None
    samples = rows.numel() // rows.shape[-1] // rows_a_sample(kept)
    x_dtype, *_, residual_dtype, _, _ = args.dtypes
    of_sum = [(x_dtype, for_x and not gates), (residual_dtype, for_residual)]
    summed = [dtype for dtype, needed in of_sum if needed and dtype is not None]
    inputs: dict[str, torch.Tensor | None] = {
        "dy": dy,
        "x": _on_one_stride(kept, rows),
        "weight": kept.weight,
        "scale": _of_samples(kept.scale, samples),
        "gate": None if kept.gate is None else _of_samples(kept.gate, samples),
        "gated": None if kept.gated is None else _on_one_stride(kept, kept.gated),
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
    mode = mode_of(Norm(args.norm), rows.dtype, dresidual_out is not None, gates)
    return Problem(mode, samples, inputs, dtypes, operands)


def _sums(kept: ModulatedSaved, samples: int, due: Sequence[bool]) -> dict[str, torch.dtype]:
    """Return the dtypes of the sums that are due: the gradient's dtype, or fp32 if more is computed from the sum."""
    _, for_scale, for_shift, for_gate, _, for_weight, for_bias = due
    affine = _is_affine(kept)
    sums = {}
    if for_scale or for_weight:
        sums["dweight"] = torch.float32 if affine else sum_dtype(kept.scale, samples)
    if for_shift or for_bias or (for_scale and kept.bias is not None):
        sums["dbias"] = torch.float32 if affine else sum_dtype(kept.shift, samples)
    if for_gate and kept.gate is not None:
        sums["dgate"] = sum_dtype(kept.gate, samples)
    return sums


def _is_affine(kept: ModulatedSaved) -> bool:
    return kept.weight is not None or kept.bias is not None


def _of_results(call: BackwardPass, totals: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients: of rows, and of what samples or all rows share, from what each sample's rows add up to."""
    kept: ModulatedSaved = call.saved
    _, for_scale, for_shift, for_gate, _, for_weight, for_bias = call.due
    grads: list[torch.Tensor | None] = [None] * len(call.due)
    grads[0] = totals.get("dx" if kept.gate is None else "dgated")
    grads[4] = totals.get("dx")
    dy_h, dy = totals.get("dweight"), totals.get("dbias")
    if for_scale and dy_h is not None:
        dscale = dy_h if kept.weight is None else dy_h * (kept.weight.float() + call.args.weight_offset)
        if kept.bias is not None and dy is not None:
            dscale = dscale + dy * kept.bias.float()
        grads[1] = shared_sum(dscale, kept.scale)
    if for_shift and dy is not None:
        grads[2] = shared_sum(dy, kept.shift)
    if for_gate and kept.gate is not None:
        grads[3] = shared_sum(totals["dgate"], kept.gate)
    if for_weight and dy_h is not None:
        grads[5] = (dy_h * (1 + kept.scale.float())).sum(0)
    if for_bias and dy is not None:
        grads[6] = (dy * (1 + kept.scale.float())).sum(0)
    return grads


def _of_samples(operand: torch.Tensor, samples: int) -> torch.Tensor:
    return operand.expand(samples, -1) if operand.dim() == 1 else operand


def _on_one_stride(_: ModulatedSaved, rows: torch.Tensor) -> torch.Tensor:
    rows = walkable(rows)
    # A sample's rows start at a multiple of it.
    return rows if isinstance(row_stride("rows", rows), int) else rows.contiguous()


IN_PARTS = Backward.of(
    MODULATED_BWD,
    ModulatedSaved,
    serves=_serves,
    formula=eager.modulated_gradients,
    laid_out=_on_one_stride,
    problem=_problem,
    of_results=_of_results,
)
CALLS = calls_of(
    MODULATED,
    eager=eager.modulated,
    saved=_saved,
    args=lambda options, dtypes, y_dtype=None: ModulatedArgs(options[0], options[2], dtypes),
    # x, gate and residual make the sum.
    recording=Recording(launch_recorded, IN_PARTS.recorded, "modulated_gradients", sums=(0, 3, 4)),
)


def normalise(operands: ModulatedOperands, options: ModulatedOptions) -> Any:
    """Run a call of a public function."""
    result = None if is_dynamo_compiling() else native.calls.modulated.normalise(operands, options)
    if result is not None:
        return result
    if is_handed_on(operands):
        args = road.named(CALLS, operands, options)
        return handed_on(CALLS.functions[options[0]], operands, args, positional=3)
    check_gate(operands)
    return normalise_family(CALLS, operands, options)
